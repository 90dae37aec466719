"""BatchNorm statistics of which none lies far from those of most clients.

Of every channel, with medians over the clients, a mean may be off by ten times the others' median distance and once the
deviation of its values, and a variance be five times the others', and ten times their distance more. Honest clients
stay inside, also those that hold few labels, and then nothing changes by a bit; what lies outside is brought to the
edge.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhm.networks.exchange import Tensors

FEWEST = 3  # clients, of which one cannot move a median far
SPREADS = 10.0  # times the median distance from the median
DEVIATIONS = 1.0  # of a channel's values: so far may its mean be off, if the others agree
TIMES = 5.0  # the others' variance


def brought_in(gathered: Sequence[Tensors]) -> tuple[list[Tensors], list[int]]:
    """Return what clients gathered, brought to where most clients are, and of each how many values were not there."""
    counts = [0] * len(gathered)
    if len(gathered) < FEWEST:
        return list(gathered), counts
    found = [dict(tensors) for tensors in gathered]
    for layer in {key.rpartition("/")[0] for key in gathered[0]}:
        variances = torch.stack([tensors[f"{layer}/variance"] for tensors in gathered])
        usual = variances.median(0).values
        usual = usual.maximum(usual.mean())  # of a channel that is dead at most clients, that of its layer
        means = torch.stack([tensors[f"{layer}/mean"] for tensors in gathered])
        middle, reach = means.median(0).values, SPREADS * _spread(means) + DEVIATIONS * usual.sqrt()
        highest = SPREADS * _spread(variances) + TIMES * usual
        bounded = {"mean": means.clamp(middle - reach, middle + reach), "variance": variances.minimum(highest)}
        for number, tensors in enumerate(gathered):
            for part, values in bounded.items():
                counts[number] += int((values[number] != tensors[f"{layer}/{part}"]).sum())
                found[number][f"{layer}/{part}"] = values[number]
    return found, counts


def _spread(values: Tensor) -> Tensor:
    """Return the median distance from the median over the clients, of every channel."""
    return (values - values.median(0).values).abs().median(0).values
