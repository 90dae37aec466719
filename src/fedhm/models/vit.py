"""A small vision transformer: patches and learned positions, pre-norm blocks, the mean over all patches.

Queries, keys and values have a layer each, so that each of them is factorized at its own rank. There is no dropout.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.errors import FedhmError

HEADS = 4


class Attention(nn.Module):
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

    def reset_parameters(self) -> None:
        """Draw the positions; those of torch would be many times as large as what they are added to."""
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
