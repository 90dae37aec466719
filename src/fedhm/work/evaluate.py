"""Accuracy and loss of one network on the test set."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.data.batches import Feed
from fedhm.machine.device import CPU


class Score(NamedTuple):
    accuracy: float  # in 0…1
    loss: float


@torch.no_grad()
def evaluate(network: nn.Module, feed: Feed, batch: int) -> Score:
    network.to(feed.device).eval()
    correct: list[Tensor] = []
    losses: list[Tensor] = []  # of each batch, summed at the end: none waits for its result
    for inputs, targets in feed.ordered(batch):
        logits = network(inputs)
        correct.append((logits.argmax(1) == targets).sum())
        losses.append(F.cross_entropy(logits, targets, reduction="sum"))
    network.to(CPU)
    samples = len(feed.samples)
    return Score(sum(torch.stack(correct).tolist()) / samples, sum(torch.stack(losses).tolist()) / samples)
