"""Networks for images and tables: a small CNN, an MLP, ResNets and a vision transformer."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.networks.info import declare
from fedhm.networks.structure import Init, he_normal


class CNN(nn.Module):
    """A small network for demos and tests: three 3×3 convolutions, a hidden layer, a classifier."""

    def __init__(self, num_classes: int, in_channels: int, width: float, init: Init = "fan-out") -> None:
        super().__init__()
        self.init = init
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
        he_normal(self, self.init)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.relu(self.bn3(self.conv3(x)))
        y: Tensor = self.fc(F.relu(self.hidden(x.mean((2, 3)))))
        return y


def cnn(num_classes: int = 10, in_channels: int = 1, width: float = 1.0, init: Init = "fan-out") -> CNN:
    """Return the small CNN; `width` scales its channels (32, 64, 128)."""
    return CNN(num_classes, in_channels, width, init)


class MLP(nn.Module):
    """A small network for tables: two hidden layers."""

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
    """A ResNet for small images: a 3×3 stem with stride 1, no pooling, four stages of blocks."""

    def __init__(
        self,
        blocks: tuple[int, int, int, int],
        num_classes: int,
        in_channels: int,
        width: float,
        init: Init = "fan-out",
    ) -> None:
        super().__init__()
        self.init = init
        channels = [max(1, round(c * width)) for c in (64, 128, 256, 512)]
        self.conv1 = nn.Conv2d(in_channels, channels[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.layer1 = self._stage(channels[0], channels[0], blocks[0], stride=1)
        self.layer2 = self._stage(channels[0], channels[1], blocks[1], stride=2)
        self.layer3 = self._stage(channels[1], channels[2], blocks[2], stride=2)
        self.layer4 = self._stage(channels[2], channels[3], blocks[3], stride=2)
        self.fc = nn.Linear(channels[3], num_classes)
        self.reset_parameters()
        # declared here and not in presets: every run of these networks then has the paper's sizes
        shortcuts = (
            name for name, layer in self.named_modules() if isinstance(layer, nn.Conv2d) and "shortcut" in name
        )
        declare(self, dense=dict.fromkeys(shortcuts, "a 1×1 shortcut, which the paper keeps"))

    def reset_parameters(self) -> None:
        """Draw the weights of all layers."""
        he_normal(self, self.init)

    @staticmethod
    def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
        first = BasicBlock(inputs, outputs, stride)
        return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


def resnet10(num_classes: int = 10, in_channels: int = 3, width: float = 1.0, init: Init = "fan-out") -> ResNet:
    """Return a ResNet-10, with one block a stage; `width` scales every stage's channels (64, 128, 256, 512)."""
    return ResNet((1, 1, 1, 1), num_classes, in_channels, width, init)


def resnet18(num_classes: int = 10, in_channels: int = 3, width: float = 1.0, init: Init = "fan-out") -> ResNet:
    """Return a ResNet-18; `width` scales every stage's channels (64, 128, 256, 512)."""
    return ResNet((2, 2, 2, 2), num_classes, in_channels, width, init)


def resnet34(num_classes: int = 100, in_channels: int = 3, width: float = 1.0, init: Init = "fan-out") -> ResNet:
    """Return a ResNet-34; `width` scales every stage's channels (64, 128, 256, 512)."""
    return ResNet((3, 4, 6, 3), num_classes, in_channels, width, init)


HEADS = 4


class Attention(nn.Module):
    """Attention with a layer each for queries, keys and values, so that each is factorized at its own rank."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(features, features), nn.Linear(features, features)
        self.value, self.out = nn.Linear(features, features), nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, tokens, features) → (batch, heads, tokens, features of a head)
        q, k, v = (layer(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.attention = Attention(features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class VisionTransformer(nn.Module):
    """Patches and learned positions, pre-norm blocks without dropout, the mean over all patches."""

    def __init__(
        self, num_classes: int, in_channels: int, width: float, depth: int, patch: int, image: tuple[int, int]
    ) -> None:
        super().__init__()
        height, across = image
        if height % patch or across % patch:
            raise FedhmError(f"model.patch = {patch} does not divide images of {height}×{across} pixels")
        features = HEADS * max(1, round(128 * width / HEADS))
        self.patches = nn.Conv2d(in_channels, features, patch, stride=patch)
        self.positions = nn.Embedding((height // patch) * (across // patch), features)
        self.blocks = nn.Sequential(*(Block(features) for _ in range(depth)))
        self.norm = nn.LayerNorm(features)
        self.fc = nn.Linear(features, num_classes)
        self.reset_parameters()
        declare(self, dense={"positions": "all of its rows are added to every image"})

    def reset_parameters(self) -> None:
        """Draw the positions; torch's default would be many times as large as the patches they are added to."""
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)  # (batch, tokens, features)
        y: Tensor = self.fc(self.norm(self.blocks(x + self.positions.weight)).mean(1))
        return y


def vit(
    num_classes: int = 10,
    in_channels: int = 3,
    width: float = 1.0,
    depth: int = 6,
    patch: int = 4,
    image: tuple[int, int] = (32, 32),
) -> VisionTransformer:
    """Return a vision transformer of `depth` blocks for images of one size; `width` scales its features (128)."""
    return VisionTransformer(num_classes, in_channels, width, depth, patch, image)
