"""What all peers train: the CNN and the cohort of pfl-research's CIFAR-10 benchmark, on random images.

Speed does not depend on what the images show, so nothing has to be downloaded.
"""

import os
from collections import OrderedDict

import torch
from torch import Tensor, nn

CLIENTS = 50  # all of them take part in every round
SAMPLES = 50
BATCH = 10
LR = 0.1
CLASSES = 10
ROUNDS = 10**6  # more than will be asked for
DEVICE = "FEDHM_BENCHMARK_DEVICE"  # in the environment of a peer: where it trains


def device() -> torch.device:
    return torch.device(os.environ.get(DEVICE, "cpu"))


def cnn() -> nn.Sequential:
    """Build two 3×3 convolutions without padding, to 32 and 64 channels, max-pooling, dropout, 128 hidden units."""
    torch.manual_seed(0)
    network = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 32, 3),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            dropout1=nn.Dropout(0.25),
            flatten=nn.Flatten(),
            hidden=nn.Linear(14 * 14 * 64, 128),
            relu3=nn.ReLU(),
            dropout2=nn.Dropout(0.5),
            classifier=nn.Linear(128, CLASSES),
        )
    )
    for parameter in network.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return network


def clients(count: int = CLIENTS) -> list[tuple[Tensor, Tensor]]:
    """Return each client's normalised images in channels-last memory, and as many labels of each class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(SAMPLES) % CLASSES
    images = [torch.randn(SAMPLES, 3, 32, 32, generator=generator) for _ in range(count)]
    return [(x.contiguous(memory_format=torch.channels_last), labels) for x in images]
