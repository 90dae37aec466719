"""BatchNorm statistics of which none lies far from those of most clients.

Of every channel, with medians over the clients, a mean may be off by ten times the others' median distance and half the
deviation of its values, and a variance be three times the others', and ten times their distance more. Honest clients
stay inside, also most of those that hold few labels, and then nothing changes by a bit. What lies outside is brought to
the edge, and what is more than twice as far off counts for nothing: the median stands in its place. A client that is
far off in a few channels may be honest. Over all of a layer's, root mean square, honest ones were a fifth as far off as
may be, at most: of who is more than a quarter as far off, all values of the layer count for nothing.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedhm.networks.exchange import Tensors

FEWEST = 3  # clients, of which one cannot move a median far
SPREADS = 10.0  # times the median distance from the median
DEVIATIONS = 0.5  # of a channel's values: so far may its mean be off, if the others agree
TIMES = 3.0  # the others' variance
HOPELESS = 2.0  # times as far off as may be
TYPICAL = 1 / 4  # as far off as may be: a client's root mean square over a layer's channels is no more


def typical(channels: int) -> float:
    """Return how far off a client may be in a layer as a whole: two channels may be at the edge."""
    return max(TYPICAL, math.sqrt(2 / channels))


class Interval(NamedTuple):
    middle: Tensor  # (channels,), the median over the clients
    reach: Tensor  # (channels,), how far from it values may be

    def bound(self, values: Tensor) -> Tensor:
        """Return the values of all clients, (clients, channels), inside; those that are there already as they are."""
        inside = values.clamp(self.middle - self.reach, self.middle + self.reach)
        whole = ((inside - self.middle) / self.reach).square().mean(1, keepdim=True).sqrt()
        lost = ((values - self.middle).abs() > HOPELESS * self.reach) | (whole > typical(values.shape[1]))
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


def brought_in(gathered: Sequence[Tensors]) -> tuple[list[Tensors], list[int]]:
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
