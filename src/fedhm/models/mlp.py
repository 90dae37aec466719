"""A small network for tables: two hidden layers."""

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, num_outputs: int, in_features: int, width: float) -> None:
        super().__init__()
        hidden = max(1, round(128 * width))
        self.first = nn.Linear(in_features, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(F.relu(self.second(F.relu(self.first(x)))))
        return y


def mlp(num_classes: int = 1, in_channels: int = 10, width: float = 1.0) -> MLP:
    """Return the small network for tables of `in_channels` columns; `width` scales its hidden layers (128)."""
    return MLP(num_classes, in_channels, width)
