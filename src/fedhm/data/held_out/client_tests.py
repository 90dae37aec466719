"""Test samples of the clients' own: held out of what each trains on, or brought along."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedhm.config.settings import CLIENT_TEST
from fedhm.data.samples import Samples
from fedhm.errors import FedhmError
from fedhm.seeds import numpy_generator


@dataclass(frozen=True)
class ClientTests:
    """What clients test on: samples that are here, or what is known of those that lie elsewhere."""

    samples: Sequence[Samples] = ()  # one for each client, perhaps of length 0; empty: no client tests
    remote: tuple[int, ...] = ()  # in their place: how many each remote client says it has
    share: float = 0.0  # remote clients that bring no test samples hold out this share of their others

    def count(self, client: int) -> int:
        """Return how many a client has; 0 if it has none, or has not said yet."""
        if self.remote:
            return self.remote[client]
        return len(self.samples[client]) if self.samples else 0

    def of(self, client: int) -> Samples | None:
        """Return a client's test samples, if they are here."""
        return self.samples[client] if self.samples else None

    def named(self) -> list[tuple[str, Samples]]:
        """Return those that are here, without the empty ones, each with what a sentence calls it."""
        return [(f"the test set of client {n}", samples) for n, samples in enumerate(self.samples) if len(samples)]

    def holders(self, sizes: Sequence[int]) -> list[int]:
        """Return the clients that have test samples, or may have some since they have not said anything yet.

        sizes  how many other samples each client has; 0: it has not said yet
        """
        if not self.share and not any(self.count(client) for client in range(len(sizes))):
            return []
        return [client for client, size in enumerate(sizes) if self.count(client) or not size]


def held_out(clients: Sequence[Samples], share: float, seed: int) -> tuple[list[Samples], ClientTests]:
    """Return what clients train on, and what they test on."""
    if not share:
        return list(clients), ClientTests()
    pairs = [split_off(samples, share, seed, client) for client, samples in enumerate(clients)]
    return [left for left, _ in pairs], ClientTests([tests for _, tests in pairs])


def split_off(samples: Samples, share: float, seed: int, client: int) -> tuple[Samples, Samples]:
    """Return what a client trains on, and what it tests on, chosen at random.

    Who has two samples or more gives at least one, and keeps at least one.
    """
    count = max(0, min(max(1, round(share * len(samples))), len(samples) - 1))
    order = torch.from_numpy(numpy_generator(seed, "client test", client).permutation(len(samples)))
    return samples.subset(order[count:].sort().values), samples.subset(order[:count].sort().values)


def brought(
    clients: Sequence[Samples], given: float | Sequence[Any], seed: int, read: Callable[[Any, str], Samples]
) -> tuple[list[Samples], ClientTests]:
    """Return what clients train on, and what they test on, from a share or from a user's own test set for each.

    read  makes samples of what a user hands in for the client that a sentence is about
    """
    if isinstance(given, float | int):
        return held_out(clients, check_share(given), seed)
    if len(given) != len(clients):
        raise FedhmError(f"client_test has {len(given)} test sets for {len(clients)} clients: each needs one, or None")
    nothing = torch.arange(0)
    tests = [
        samples.subset(nothing) if data is None else read(data, f"the test set of client {client}")
        for client, (samples, data) in enumerate(zip(clients, given, strict=True))
    ]
    return list(clients), ClientTests(tests if any(len(samples) for samples in tests) else ())


def default_share(test: bool) -> float:
    """Return the share that clients hold out if nothing is said of it; `test`: the server has a test set."""
    return 0.0 if test else CLIENT_TEST


def check_share(given: Any) -> float:
    """Return the share that a user gave to be held out, or refuse it."""
    if isinstance(given, bool) or not isinstance(given, float | int) or not 0 <= given < 1:
        raise FedhmError(f"client_test must be a share of every client's samples, from 0 to below 1, not {given!r}")
    return float(given)
