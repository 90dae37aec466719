"""The metrics of one network on a set of samples."""

from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from fedhm.config.objective import Metrics, Objective
from fedhm.data.batches import Feed
from fedhm.machine.device import CPU


@torch.no_grad()
def evaluate(network: nn.Module, feed: Feed, batch: int, objective: Objective) -> Metrics:
    """Return what the objective measures over all samples of the feed."""
    network.to(feed.device).eval()
    found: dict[str, list[Tensor]] = {}  # of each batch, summed at the end: none waits for its result
    for inputs, targets in feed.ordered(batch):
        for name, value in objective.sums(network(inputs), targets).items():
            found.setdefault(name, []).append(value)
    network.to(CPU)
    sums = {name: reduce(add, torch.stack(values).cpu().double()) for name, values in found.items()}
    return objective.results(sums, len(feed.samples))
