"""Accuracy and loss of one network on the test set."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fedhm.data.batches import Feed


class Score(NamedTuple):
    accuracy: float  # in 0…1
    loss: float


@torch.no_grad()
def evaluate(network: nn.Module, feed: Feed, batch: int) -> Score:
    network.eval()
    correct, loss = 0, 0.0
    for inputs, targets in feed.ordered(batch):
        logits = network(inputs)
        correct += int((logits.argmax(1) == targets).sum())
        loss += F.cross_entropy(logits, targets, reduction="sum").item()
    return Score(correct / len(feed.samples), loss / len(feed.samples))
