"""ResNets for small images, the paper's and a smaller one: a 3×3 stem, stride 1, no pooling, four stages of blocks."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.networks.initial import he_normal


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, blocks: tuple[int, int, int, int], num_classes: int, in_channels: int, width: float) -> None:
        super().__init__()
        channels = [max(1, round(c * width)) for c in (64, 128, 256, 512)]
        self.conv1 = nn.Conv2d(in_channels, channels[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.layer1 = self._stage(channels[0], channels[0], blocks[0], stride=1)
        self.layer2 = self._stage(channels[0], channels[1], blocks[1], stride=2)
        self.layer3 = self._stage(channels[1], channels[2], blocks[2], stride=2)
        self.layer4 = self._stage(channels[2], channels[3], blocks[3], stride=2)
        self.fc = nn.Linear(channels[3], num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of all layers."""
        he_normal(self)

    @staticmethod
    def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
        first = BasicBlock(inputs, outputs, stride)
        return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


def resnet10(num_classes: int = 10, in_channels: int = 3, width: float = 1.0) -> ResNet:
    """Return a ResNet-10, one block in each stage; `width` scales every stage's channels (64, 128, 256, 512)."""
    return ResNet((1, 1, 1, 1), num_classes, in_channels, width)


def resnet18(num_classes: int = 10, in_channels: int = 3, width: float = 1.0) -> ResNet:
    """Return a ResNet-18; `width` scales every stage's channels (64, 128, 256, 512)."""
    return ResNet((2, 2, 2, 2), num_classes, in_channels, width)


def resnet34(num_classes: int = 100, in_channels: int = 3, width: float = 1.0) -> ResNet:
    """Return a ResNet-34; `width` scales every stage's channels (64, 128, 256, 512)."""
    return ResNet((3, 4, 6, 3), num_classes, in_channels, width)
