"""What a private round does to the sum of its clients' changes, so that none of them can be told from it.

With W the model before the round, and Dₚ what participant p changed, recovered to full shape and cut as a whole to
‖Dₚ‖ ≤ C,

    W ← W + (Σₚ Dₚ + N(0, (z C)²)) / n        n = q · clients that have a network, whoever took part

A client more or less changes the sum by C at most. All that follows, a decomposition, the server's optimizer, the
tiers' models, is made of W alone, and tells no more than it does.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedhm.config.settings import Config
from fedhm.errors import FedhmError
from fedhm.lowrank.changes.change import within
from fedhm.lowrank.hybrid import plan_of
from fedhm.networks.exchange import Tensors, averages
from fedhm.seeds import Secret, secret_normals
from fedhm.server.flatten import Way, mapped
from fedhm.server.participants.sampling import expected_to_train, independently
from fedhm.server.privacy.accountant import epsilon_after
from fedhm.server.record import Record
from fedhm.work.messages import Participant, Task, Update
from fedhm.work.work import work_of

S = TypeVar("S")


class Averaging(Protocol):
    """What a private round knows of a method (`methods/method.py`)."""

    tiers: tuple[str, ...]
    levels: tuple[str, ...]
    recovers: bool
    state_type: type[Any]

    def network(self, name: str) -> nn.Module:
        """Return a new network of a tier."""
        ...


class Mechanism:
    """Differential privacy of one run. Where the clients add their noise, the server only counts.

    fixed   names of tensors that training leaves alone: they get no noise, and are held to what they were
    secret  is to be filled in before the first round
    """

    def __init__(self, config: Config, method: Averaging, clients: int, fixed: Set[str], secret: Secret) -> None:
        self.config, self.secret, self.at_server = config.privacy, secret, config.privacy.at_server
        self._whole, self._method, self._clients, self._fixed = config, method, clients, fixed
        self._expected = expected_to_train(config.federation, clients, method.levels, method.tiers)
        self._factorized = cache(lambda name: frozenset(plan_of(method.network(name)) if method.recovers else ()))

    def participants(self, round_number: int) -> list[Participant]:
        """Return who takes part in a round: every client independently, as the accountant assumes."""
        federation, seed, levels = self._whole.federation, self._whole.seed, self._method.levels
        return independently(federation, self._clients, levels, seed, round_number, self.secret.value)

    def check(self, tasks: Iterable[Task]) -> None:
        """Refuse tasks for which a client sends anything but one network that it trained."""
        seen: set[int] = set()
        for task in tasks:
            work = work_of(task.kind)
            if task.client in seen or task.kept or not (work.trains and work.returns_network):
                raise FedhmError(
                    f"method.name = '{self._whole.method.name}' has clients send more than one network that they "
                    "trained, which [privacy] does not cover: choose fedhm or fedavg"
                )
            seen.add(task.client)

    def bounded(self, updates: Iterable[Update], tasks: Sequence[Task]) -> "Bounded":
        return Bounded(replace(each, tensors=self._cut(each, tasks[each.position])) for each in updates)

    def _cut(self, update: Update, task: Task) -> Tensors:
        """Return what a client sent back, as far away from what it was sent as it may be."""
        sent, layers = work_of(task.kind).loaded(task), self._factorized(task.network)
        held = {name for name in sent if name in self._fixed or self._of_fixed(name, layers)}
        returned = {name: sent[name] if name in held else tensor for name, tensor in update.tensors.items()}
        return within(returned, sent, layers, self.config.clip)

    def _of_fixed(self, name: str, layers: Set[str]) -> bool:
        """Tell whether a tensor is a factor of a weight that training leaves alone."""
        layer, _, _ = name.rpartition(".")
        return layer in layers and f"{layer}.weight" in self._fixed

    def released(self, before: S, merged: S, count: int, round_number: int) -> S:
        """Return the state with noise, in place of `merged`, into which so many updates went."""
        averaged = self._method.state_type.averaged
        old, share = dict[str, Tensor](), count / self._expected
        mapped(_fields(before, averaged), lambda name, _, tensor: old.setdefault(name, tensor))
        sums = _digest(_fields(merged, averaged), count)

        def moved(name: str, way: Way, mean: Tensor) -> Tensor:
            if way[-1] in self._fixed or not averages(mean):
                return old[name]
            after, start = (_as_doubles(tensor) for tensor in (mean, old[name]))
            new = start + share * (after - start) + self._noise(after, name, round_number, sums)
            if way[-1].endswith("running_var"):
                new.clamp_(min=0.0)  # noise may leave less, and there is no such variance
            return (torch.view_as_complex(new) if mean.is_complex() else new).to(mean.dtype)

        return replace(merged, **mapped(_fields(merged, averaged), moved))  # type: ignore[type-var]

    def _noise(self, like: Tensor, name: str, round_number: int, sums: str) -> Tensor:
        """Return the noise of one tensor, which is drawn anew where other sums are to be hidden.

        A round that is repeated, since it was interrupted, has the same; but if other clients answer then, their
        sum must not be hidden by numbers that have hidden another: the difference of the two would be bare.
        """
        scale = self.config.noise * self.config.clip / self._expected
        drawn = secret_normals(self.secret.value, like.numel(), "noise", round_number, name, sums)
        return drawn.view(like.shape) * scale

    def epsilon(self, records: Sequence[Record]) -> float | None:
        return epsilon_after(records, self._whole)


class Bounded:
    """Updates that are cut to the bound, and how many of them there were."""

    def __init__(self, updates: Iterable[Update]) -> None:
        self._updates, self.count = updates, 0

    def __iter__(self) -> Iterator[Update]:
        for update in self._updates:
            self.count += 1
            yield update


def _fields(state: Any, averaged: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(state, name) for name in averaged}


def _as_doubles(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _digest(fields: dict[str, Any], count: int) -> str:
    digest = hashlib.blake2b(str(count).encode())

    def add(_: str, __: Way, tensor: Tensor) -> Tensor:
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return tensor

    mapped(fields, add)
    return digest.hexdigest()
