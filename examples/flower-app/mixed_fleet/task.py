"""The model and the data, in plain PyTorch: replace both by your own."""

import torch
from flwr.app import Context
from sklearn.datasets import load_digits
from torch import Tensor, nn

CLASSES = 10
TEST = 300  # samples that no client sees


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


def client_data(context: Context) -> tuple[Tensor, Tensor]:
    """Return this client's part of scikit-learn's handwritten digits; a real client reads its own files."""
    part, parts = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    inputs, labels = _digits()
    return inputs[TEST:][part::parts], labels[TEST:][part::parts]


def test_data() -> tuple[Tensor, Tensor]:
    inputs, labels = _digits()
    return inputs[:TEST], labels[:TEST]


def _digits() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
