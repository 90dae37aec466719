"""No update may be longer than a multiple of how far clients usually move.

Updates pass one by one, in the order of their tasks. Only the first few of a round are held back until the median over
these is known: memory stays independent of the number of clients.
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
    """What the defence leaves in a round's record."""

    norms: dict[str, dict[str, dict[int, float]]]  # by part, tier and client: what was left of them
    clipped: list[dict[str, Any]]
    dropped: list[dict[str, Any]]
    agreement: dict[int, AgreementScore] = field(default_factory=dict)  # by client
    disagreeing: int = 0  # updates that were dropped for it


def clip(
    arriving: Iterable[UpdateDelta], history: NormHistory, round_number: int, log: DefenceLog
) -> Iterator[UpdateDelta]:
    """Yield the updates, those that are too long cut to the bound."""
    rest = iter(arriving)
    held, now = _held_back(rest)
    for each in chain(held, rest):
        yield _bounded(each, history, round_number, now, log)


def _held_back(arriving: Iterator[UpdateDelta]) -> tuple[list[UpdateDelta], dict[str, list[float]]]:
    """Return the first updates, of as many clients as settle a median, and by part the norms of those clients."""
    held: list[UpdateDelta] = []
    norms: dict[str, dict[int, float]] = {}
    for each in arriving:
        held.append(each)
        for part, change in each.parts.items():
            note(norms.setdefault(part, {}), each.update.client, finite_norm(change))
        if all(len(of_part) >= ENOUGH_NORMS for of_part in norms.values()):
            break
    return held, {part: list(of_part.values()) for part, of_part in norms.items()}


def _bounded(
    each: UpdateDelta, history: NormHistory, round_number: int, now: dict[str, list[float]], log: DefenceLog
) -> UpdateDelta:
    lengths: dict[str, float] = {}
    client, tier = each.update.client, each.update.tier
    for part, change in each.parts.items():
        norm = finite_norm(change)
        bound = history.bound(part, tier, round_number, now.get(part, ()))
        if bound is not None and norm > bound:
            lengths[part] = bound
            entry = {"client": client, "tier": tier, "part": part, "norm": norm, "bound": bound}
            log.clipped.append(entry)
        note(log.norms.setdefault(part, {}).setdefault(tier, {}), client, lengths.get(part, norm))
    return each.cut(lengths)


def note(norms: dict[int, float], client: int, norm: float) -> None:
    norms[client] = max(norm, norms.get(client, 0.0))


# How much a client may count for by the number of samples that it says it has, and by its loss.
#
# Nobody sees a remote client's samples. One that claims 2⁶² of them would own every mean by samples, the pooled
# BatchNorm statistics and the pooled metrics: no client counts for more than a multiple of the median of what all
# say.

TIMES_MEDIAN = 10  # of the clients' numbers of samples
LOSS_TIMES_MEDIAN = 100.0


def sample_limit(said: Iterable[int]) -> int | None:
    """Return for how many samples a client may count; None: nobody has said how many it has."""
    known = [count for count in said if count]
    return TIMES_MEDIAN * statistics.median_low(known) if known else None


def cap_samples(update: Update, most: int | None) -> Update:
    """Return the update of a client that counts for no more than so many samples: sums and counts shrink with them."""
    if most is None or update.samples <= most:
        return update
    share, tensors = most / update.samples, update.tensors
    if work_of(update.kind).tests:
        tensors = {name: tensor * share for name, tensor in tensors.items()}
    elif update.kind == STATISTICS:
        tensors = {name: t * share if name.endswith("/values") else t for name, t in tensors.items()}
    return replace(update, samples=most, tensors=tensors)


def typical_loss(losses: Sequence[float], mean: float) -> float:
    """Return the mean loss; where one is out of all proportion to most, the median, which it does not move."""
    middle = statistics.median_low(losses)
    return middle if max(map(abs, losses)) > LOSS_TIMES_MEDIAN * max(1.0, abs(middle)) else mean


# BatchNorm statistics of which none lies far from those of most clients.
#
# Of every channel, with medians over the clients, a mean may be off by ten times the others' median distance and half
# the deviation of its values, and a variance be three times the others', and ten times their distance more. Honest
# clients stay inside, also most of those that hold few labels, and then nothing changes by a bit. What lies outside
# is brought to the edge, and what is more than twice as far off counts for nothing: the median stands in its place. A
# client that is far off in a few channels may be honest. Over all of a layer's, root mean square, honest ones were a
# fifth as far off as may be, at most: of who is more than a quarter as far off, all values of the layer count for
# nothing.

FEWEST = 3  # clients, of which one cannot move a median far
SPREADS = 10.0  # times the median distance from the median
DEVIATIONS = 0.5  # of a channel's values: so far may its mean be off, if the others agree
TIMES = 3.0  # the others' variance
DISCARD_FACTOR = 2.0  # times as far off as may be
LAYER_SHARE = 1 / 4  # as far off as may be: a client's root mean square over a layer's channels is no more


def layer_limit(channels: int) -> float:
    """Return how far off a client may be in a layer as a whole: two channels may be at the edge."""
    return max(LAYER_SHARE, math.sqrt(2 / channels))


class Interval(NamedTuple):
    middle: Tensor  # (channels,), the median over the clients
    reach: Tensor  # (channels,), how far from it values may be

    def bound(self, values: Tensor) -> Tensor:
        """Return the values of all clients, (clients, channels), inside; those that are there already as they are."""
        inside = values.clamp(self.middle - self.reach, self.middle + self.reach)
        whole = ((inside - self.middle) / self.reach).square().mean(1, keepdim=True).sqrt()
        lost = ((values - self.middle).abs() > DISCARD_FACTOR * self.reach) | (whole > layer_limit(values.shape[1]))
        return torch.where(lost, self.middle, inside)


def intervals(gathered: Sequence[Tensors], layer: str) -> dict[str, Interval]:
    """Return where the means and variances of a layer may lie, by their names."""
    means, variances = (torch.stack([t[f"{layer}/{part}"] for t in gathered]) for part in ("mean", "variance"))
    middle = variances.median(0).values
    usual = middle.maximum(middle.mean())  # of a channel that is dead at most clients, that of its layer
    return {
        "mean": Interval(means.median(0).values, SPREADS * _spread(means) + DEVIATIONS * usual.sqrt()),
        "variance": Interval(middle, SPREADS * _spread(variances) + (TIMES - 1) * usual),
    }


def clamp_outliers(gathered: Sequence[Tensors]) -> tuple[list[Tensors], list[int]]:
    """Return what clients gathered, brought to where most clients are, and of each how many values were not there."""
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
    """Return the median distance from the median over the clients, of every channel."""
    return (values - values.median(0).values).abs().median(0).values
