"""A small model and random data, the same for every process."""

import torch
from flwr.app import Context
from torch import Tensor, nn

CLASSES = 3


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, CLASSES))


def samples(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(40 + number, 12, generator=generator)
    return inputs, inputs[:, :CLASSES].argmax(dim=1)


def client_data(context: Context) -> tuple[Tensor, Tensor]:
    return samples(int(context.node_config["partition-id"]))


def test_data() -> tuple[Tensor, Tensor]:
    return samples(100)
