"""A small convolutional network for demos and tests: three 3×3 convolutions, a hidden layer, a classifier."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.networks.initial import he_normal


class CNN(nn.Module):
    def __init__(self, num_classes: int, in_channels: int, width: float) -> None:
        super().__init__()
        a, b, c = (max(1, round(channels * width)) for channels in (32, 64, 128))
        self.conv1 = nn.Conv2d(in_channels, a, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(a)
        self.conv2 = nn.Conv2d(a, b, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(b)
        self.conv3 = nn.Conv2d(b, c, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(c)
        self.hidden = nn.Linear(c, c)
        self.fc = nn.Linear(c, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of all layers."""
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.relu(self.bn3(self.conv3(x)))
        y: Tensor = self.fc(F.relu(self.hidden(x.mean((2, 3)))))
        return y


def cnn(num_classes: int = 10, in_channels: int = 1, width: float = 1.0) -> CNN:
    """Return the small CNN; `width` scales its channels (32, 64, 128)."""
    return CNN(num_classes, in_channels, width)
