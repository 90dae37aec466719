"""Bounds on a single client: the norm of its update, the samples that it claims, its loss, its BatchNorm statistics.

All bounds follow from the values of the other clients. Values within the bounds stay as they are, bit for bit.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedhm.networks.exchange import Tensors
from fedhm.server.filters.history import ENOUGH_NORMS, AgreementScore, NormHistory, UpdateDelta, finite_norm
from fedhm.work.messages import Update
from fedhm.work.statistics import STATISTICS
from fedhm.work.work import work_of


@dataclass
class DefenceLog:
    """What the defence did in a round. The fields are those of the round's record."""

    norms: dict[str, dict[str, dict[int, float]]]  # by part, tier and client, after clipping
    clipped: list[dict[str, Any]]
    dropped: list[dict[str, Any]]
    agreement: dict[int, AgreementScore] = field(default_factory=dict)  # by client


# The norm of an update


def clip(
    arriving: Iterable[UpdateDelta], history: NormHistory, round_number: int, log: DefenceLog
) -> Iterator[UpdateDelta]:
    """Yield the updates in the order of their tasks; updates that are too long are clipped to their bound.

    No update may be longer than a multiple of how far clients usually move. Only the first few updates of a round are
    held back until their median is known, so memory does not depend on the number of clients.
    """
    rest = iter(arriving)
    held, now = _hold_back(rest)
    for each in chain(held, rest):
        yield _clipped(each, history, round_number, now, log)


def _hold_back(arriving: Iterator[UpdateDelta]) -> tuple[list[UpdateDelta], dict[str, list[float]]]:
    """Return the first updates, of enough clients for a median, and by part the norms of these clients."""
    held: list[UpdateDelta] = []
    norms: dict[str, dict[int, float]] = {}
    for each in arriving:
        held.append(each)
        for part, change in each.parts.items():
            _keep_largest(norms.setdefault(part, {}), each.update.client, finite_norm(change))
        if all(len(by_client) >= ENOUGH_NORMS for by_client in norms.values()):
            break
    return held, {part: list(by_client.values()) for part, by_client in norms.items()}


def _clipped(
    each: UpdateDelta, history: NormHistory, round_number: int, now: dict[str, list[float]], log: DefenceLog
) -> UpdateDelta:
    bounds: dict[str, float] = {}
    client, tier = each.update.client, each.update.tier
    for part, change in each.parts.items():
        norm = finite_norm(change)
        bound = history.bound(part, tier, round_number, now.get(part, ()))
        if bound is not None and norm > bound:
            bounds[part] = bound
            log.clipped.append({"client": client, "tier": tier, "part": part, "norm": norm, "bound": bound})
        _keep_largest(log.norms.setdefault(part, {}).setdefault(tier, {}), client, bounds.get(part, norm))
    return each.with_norms(bounds)


def _keep_largest(norms: dict[int, float], client: int, norm: float) -> None:
    norms[client] = max(norm, norms.get(client, 0.0))


# The samples that a client claims, and its loss

SAMPLES_OVER_MEDIAN = 10  # a client counts for at most this multiple of the median number of samples
LOSS_OVER_MEDIAN = 100.0  # if a loss is larger than this multiple of the median, the mean loss is not used


def sample_limit(claimed: Iterable[int]) -> int | None:
    """Return how many samples a client may count for; None: no client has said how many it has.

    The server cannot see a remote client's samples. A client that claims 2⁶² samples would own every mean by samples,
    the pooled BatchNorm statistics and the pooled metrics. So no client counts for more than a multiple of the median
    of all claims.
    """
    known = [count for count in claimed if count]
    return SAMPLES_OVER_MEDIAN * statistics.median_low(known) if known else None


def cap_samples(update: Update, limit: int | None) -> Update:
    """Return the update with at most `limit` samples; its sums and counts shrink in proportion."""
    if limit is None or update.samples <= limit:
        return update
    share, tensors = limit / update.samples, update.tensors
    if work_of(update.kind).tests:
        tensors = {name: tensor * share for name, tensor in tensors.items()}
    elif update.kind == STATISTICS:
        tensors = {name: t * share if name.endswith("/values") else t for name, t in tensors.items()}
    return replace(update, samples=limit, tensors=tensors)


def typical_loss(losses: Sequence[float], mean: float) -> float:
    """Return the mean loss; if one loss is far larger than most, the median, which that loss does not move."""
    middle = statistics.median_low(losses)
    return middle if max(map(abs, losses)) > LOSS_OVER_MEDIAN * max(1.0, abs(middle)) else mean


# BatchNorm statistics

FEWEST = 3  # with three clients, one of them cannot move a median far
SPREADS = 10.0  # allowed multiple of the median distance from the median
DEVIATIONS = 0.5  # of a channel's standard deviation: a mean may be off by this even if the others agree exactly
TIMES = 3.0  # a variance may be this multiple of the others', even if the others agree exactly
DISCARD_FACTOR = 2.0  # beyond this multiple of the allowed distance, a value is replaced by the median
LAYER_SHARE = 1 / 4  # of the allowed distance: limit on a client's root mean square over a layer's channels


def layer_limit(channels: int) -> float:
    """Return how far off a client may be over a layer as a whole. Two channels may be at the edge."""
    return max(LAYER_SHARE, math.sqrt(2 / channels))


class Interval(NamedTuple):
    """The values of a layer's channels that are accepted."""

    middle: Tensor  # (channels,), the median over the clients
    reach: Tensor  # (channels,), the allowed distance from it

    def bound(self, values: Tensor) -> Tensor:
        """Return the values of all clients, (clients, channels), within the interval.

        Values outside move to its edge. Values that are far outside, and layers that are far off as a whole, are
        replaced by the median.
        """
        inside = values.clamp(self.middle - self.reach, self.middle + self.reach)
        whole = ((inside - self.middle) / self.reach).square().mean(1, keepdim=True).sqrt()
        lost = ((values - self.middle).abs() > DISCARD_FACTOR * self.reach) | (whole > layer_limit(values.shape[1]))
        return torch.where(lost, self.middle, inside)


def intervals(gathered: Sequence[Tensors], layer: str) -> dict[str, Interval]:
    """Return the intervals of a layer's means and variances, by the names of these."""
    means, variances = (torch.stack([t[f"{layer}/{part}"] for t in gathered]) for part in ("mean", "variance"))
    middle = variances.median(0).values
    usual = middle.maximum(middle.mean())  # a channel that is dead at most clients gets the variance of its layer
    return {
        "mean": Interval(means.median(0).values, SPREADS * _spread(means) + DEVIATIONS * usual.sqrt()),
        "variance": Interval(middle, SPREADS * _spread(variances) + (TIMES - 1) * usual),
    }


def clamp_outliers(gathered: Sequence[Tensors]) -> tuple[list[Tensors], list[int]]:
    """Return the clients' BatchNorm statistics without outliers, and how many values of each client were changed.

    In every channel, with medians over the clients, a mean may be off by ten times the others' median distance plus
    half a standard deviation of its values. A variance may be three times the others' plus ten times their median
    distance. Honest clients stay inside, even most clients that hold few labels, and then no bit changes.

    Values outside move to the edge. Values that are more than twice as far off are replaced by the median. A client
    that is far off in a few channels may be honest. Over all channels of a layer, in root mean square, honest clients
    were at most a fifth of the allowed distance off. If a client is more than a quarter off, all its values of the
    layer are replaced by the median.
    """
    counts = [0] * len(gathered)
    if len(gathered) < FEWEST:
        return list(gathered), counts
    found = [dict(tensors) for tensors in gathered]
    for layer in {key.rpartition("/")[0] for key in gathered[0]}:
        for part, interval in intervals(gathered, layer).items():
            name = f"{layer}/{part}"
            bounded = interval.bound(torch.stack([tensors[name] for tensors in gathered]))
            for number, tensors in enumerate(gathered):
                counts[number] += int((bounded[number] != tensors[name]).sum())
                found[number][name] = bounded[number]
    return found, counts


def _spread(values: Tensor) -> Tensor:
    """Return every channel's median distance from its median over the clients."""
    return (values - values.median(0).values).abs().median(0).values
