"""Validation data: samples held out of what the clients train on, to choose settings by without the test set."""

from collections.abc import Sequence

import torch

from fedhm.data.samples import Samples, concatenate
from fedhm.errors import FedhmError
from fedhm.seeds import numpy_generator


def hold_out(clients: Sequence[Samples], share: float, seed: int) -> tuple[list[Samples], Samples]:
    """Return what is left to each client, and the samples that are held out of all of them, chosen at random.

    Shares are rounded over the clients together, so that many small ones do not all round to nothing; each keeps at
    least one sample.
    """
    left: list[Samples] = []
    held: list[Samples] = []
    seen = taken = 0
    for number, samples in enumerate(clients):
        seen += len(samples)
        count = max(0, min(round(share * seen) - taken, len(samples) - 1))
        taken += count
        order = torch.from_numpy(numpy_generator(seed, "validation", number).permutation(len(samples)))
        held.append(samples.subset(order[:count].sort().values))
        left.append(samples.subset(order[count:].sort().values))
    if not taken:
        raise FedhmError(f"data.validation = {share:g} holds nothing out of {seen} samples: choose a larger share")
    return left, concatenate(held)
