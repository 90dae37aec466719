"""From samples in memory to batches: gathered, augmented and normalised as tensors, with no process in between."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhm.data.samples import Samples

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Preprocessing:
    """How images become network input: normalised, and in training shifted and mirrored at random."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    crop: int = 0  # a random window after padding by so many black pixels
    flip: bool = False  # mirrored left to right, every second time

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 (B, H, W, C) → float (B, C, H, W) in channels-last memory."""
        scale = torch.tensor(self.std) * 255
        offset = torch.tensor(self.mean) * 255
        return pixels.float().sub_(offset).div_(scale).permute(0, 3, 1, 2)


class Feed:
    """One client's samples, ready to be drawn in batches."""

    def __init__(self, samples: Samples, preprocessing: Preprocessing) -> None:
        self.samples = samples
        self.preprocessing = preprocessing
        self._pixels = samples.inputs.permute(0, 2, 3, 1).contiguous() if samples.are_images else None
        self._padded: Tensor | None = None

    def shuffled(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """One epoch in random order, augmented."""
        order = torch.randperm(len(self.samples), generator=generator)
        for indices in _split(order, size):
            yield self._augmented(indices, generator), self.samples.labels[indices]

    def ordered(self, size: int) -> Iterator[Batch]:
        """Every sample once, in order, not augmented."""
        for indices in _split(torch.arange(len(self.samples)), size):
            yield self._plain(indices), self.samples.labels[indices]

    def _plain(self, indices: Tensor) -> Tensor:
        if self._pixels is None:
            return self.samples.inputs[indices]
        return self.preprocessing.normalise(self._pixels[indices])

    def _augmented(self, indices: Tensor, generator: torch.Generator) -> Tensor:
        pad, flip = self.preprocessing.crop, self.preprocessing.flip
        if self._pixels is None or not (pad or flip):
            return self._plain(indices)
        _, height, width, _ = self._pixels.shape
        if self._padded is None:
            self._padded = F.pad(self._pixels, (0, 0, pad, pad, pad, pad))
        count = len(indices)
        # Window and mirror image together are one gather: which row and which column each output pixel comes from.
        top, left = torch.randint(0, 2 * pad + 1, (2, count, 1), generator=generator)
        columns = torch.arange(width).expand(count, width)
        if flip:
            mirrored = torch.randint(0, 2, (count, 1), generator=generator).bool()
            columns = torch.where(mirrored, columns.flip(1), columns)
        rows = top + torch.arange(height)
        columns = left + columns
        return self.preprocessing.normalise(self._padded[indices[:, None, None], rows[:, :, None], columns[:, None]])


def _split(order: Tensor, size: int) -> list[Tensor]:
    """A last batch of one sample joins the one before: batch normalisation has no variance of a single value."""
    parts = list(order.split(size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts
