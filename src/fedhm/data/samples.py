"""Samples in memory, and batches of them: gathered, augmented and normalised as tensors, in this process."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhm.data.tokens import TARGETS, Tokens, concatenate_tokens
from fedhm.errors import FedhmError
from fedhm.machine.device import CPU
from fedhm.networks.inputs import Inputs
from fedhm.networks.saving import split_batches


@dataclass(frozen=True)
class Samples:
    """Inputs (N, …), and labels: class numbers (N,), or numbers to predict (N,) or (N, outputs).

    Images are uint8 (N, C, H, W), and text is `Tokens`. Any other input is used unchanged.
    """

    inputs: Tensor | Tokens
    labels: Tensor

    def __post_init__(self) -> None:
        numbers = self.labels.is_floating_point()
        if self.labels.ndim not in ((1, 2) if numbers else (1,)) or len(self.labels) != len(self.inputs):
            raise FedhmError(
                f"labels must be one {'row of numbers' if numbers else 'integer'} per sample: "
                f"got inputs {tuple(self.inputs.shape)} and labels {tuple(self.labels.shape)}"
            )
        if not numbers and self.labels.dtype != torch.int64:
            raise FedhmError(f"labels must be int64 class numbers, or numbers to predict, not {self.labels.dtype}")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def tensor(self) -> Tensor:
        """Return the inputs, which are one tensor and not text."""
        assert isinstance(self.inputs, Tensor)
        return self.inputs

    @property
    def example(self) -> Tensor | Tokens:
        """Return one typical input."""
        return self.inputs[self.inputs.median_index()] if isinstance(self.inputs, Tokens) else self.inputs[0]

    @property
    def are_images(self) -> bool:
        return self.inputs.dtype == torch.uint8 and self.inputs.ndim == 4

    def subset(self, indices: Tensor) -> "Samples":
        inputs = self.inputs[indices]
        if isinstance(inputs, Tokens):
            return Samples(inputs, self.labels[indices])
        # networks want channels last: converted once here, not for every batch
        return Samples(
            inputs.contiguous(memory_format=torch.channels_last) if self.are_images else inputs, self.labels[indices]
        )


@dataclass(frozen=True)
class Source:
    """A data set as read from disk: training and test samples, and how to normalise images."""

    train: Samples
    test: Samples
    classes: int
    mean: tuple[float, ...]  # per channel, of pixels in 0…1
    std: tuple[float, ...]


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of uint8 images (N, C, H, W), in units of 0…1, exactly.

    It counts the 256 pixel values, so that no float copy of the data set is made.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    means: list[float] = []
    deviations: list[float] = []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].flatten(), minlength=256).double()
        mean = (counts * values).sum() / counts.sum()
        variance = (counts * (values - mean) ** 2).sum() / counts.sum()
        means.append(mean.item())
        deviations.append(max(variance.sqrt().item(), 1e-6))  # a constant channel must not divide by zero
    return tuple(means), tuple(deviations)


def concatenate(parts: Sequence[Samples]) -> Samples:
    labels = torch.cat([p.labels for p in parts])
    tokens = [p.inputs for p in parts if isinstance(p.inputs, Tokens)]
    return Samples(concatenate_tokens(tokens) if tokens else torch.cat([p.tensor for p in parts]), labels)


Batch = tuple[Inputs, Tensor]


@dataclass(frozen=True)
class Preprocessing:
    """How images become network inputs: normalised, and in training shifted and mirrored at random."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    crop: int = 0  # a random window after padding by this many black pixels
    flip: bool = False  # mirrored left to right, with probability 1/2

    def check(self, samples: Samples) -> None:
        """Refuse images without a mean and deviation of each channel."""
        channels = samples.inputs.shape[1] if samples.are_images else 0
        if channels and not len(self.mean) == len(self.std) == channels:
            raise FedhmError(f"uint8 images are normalised: give mean and std of each channel, {channels} of both")

    def normalise(self, pixels: Tensor) -> Tensor:
        """Normalise pixels: uint8 (B, H, W, C) → float (B, C, H, W) in channels-last memory."""
        width, device = pixels.shape[2], pixels.device
        values = pixels.float()
        # a whole line of pixels at a time: an inner loop over three channels would be slow
        lines = values.view(-1, width * pixels.shape[3])
        lines.sub_(_line(self.mean, width, device)).div_(_line(self.std, width, device))
        return values.permute(0, 3, 1, 2)


@lru_cache(maxsize=16)
def _line(channels: tuple[float, ...], width: int, device: torch.device) -> Tensor:
    return (torch.tensor(channels) * 255).repeat(width).to(device)


class Feed:
    """Samples that are drawn in batches on a device."""

    def __init__(self, samples: Samples, preprocessing: Preprocessing, device: torch.device = CPU) -> None:
        self.samples, self.preprocessing, self.device = samples, preprocessing, device

    def on(self, device: torch.device) -> "Feed":
        feed = copy(self)
        feed.device = device
        return feed

    def shuffled(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Yield the batches of one epoch, in random order and augmented."""
        if isinstance(self.samples.inputs, Tokens):
            yield from map(self._padded, self.samples.inputs.buckets(size, generator))
            return
        order = torch.randperm(len(self.samples), generator=generator)
        for indices in split_batches(order, size):
            yield self._augmented(indices, generator), self._labels(indices)

    def ordered(self, size: int) -> Iterator[Batch]:
        """Yield every sample once, in order and not augmented; sequences in the order of their lengths."""
        if isinstance(self.samples.inputs, Tokens):
            yield from map(self._padded, self.samples.inputs.by_length(size))
            return
        for indices in split_batches(torch.arange(len(self.samples)), size):
            yield self._plain(indices), self._labels(indices)

    def one(self) -> Batch:
        """Return a batch of one typical sample: the first, or a sequence of median length."""
        if isinstance(self.samples.inputs, Tokens):
            return self._padded(self.samples.inputs.median_index())
        return next(self.ordered(1))

    def _padded(self, indices: Tensor) -> Batch:
        assert isinstance(self.samples.inputs, Tokens)
        batch = {name: tensor.to(self.device) for name, tensor in self.samples.inputs.padded(indices).items()}
        targets = batch.pop(TARGETS, None)  # of each token, if there are any
        return batch, self._labels(indices) if targets is None else targets

    def _labels(self, indices: Tensor) -> Tensor:
        return self.samples.labels.index_select(0, indices).to(self.device)

    def _plain(self, indices: Tensor) -> Tensor:
        if not self.samples.are_images:
            return self.samples.tensor.index_select(0, indices).to(self.device)
        return self.preprocessing.normalise(self._pixels(indices).to(self.device))

    def _pixels(self, indices: Tensor) -> Tensor:
        """Return pixels as (B, H, W, C); only the batch is permuted if the samples have another memory layout."""
        whole = self.samples.tensor.permute(0, 2, 3, 1)
        if whole.is_contiguous():
            return whole.index_select(0, indices)
        return self.samples.tensor.index_select(0, indices).permute(0, 2, 3, 1).contiguous()

    def _augmented(self, indices: Tensor, generator: torch.Generator) -> Tensor:
        pad, flip = self.preprocessing.crop, self.preprocessing.flip
        if not self.samples.are_images or not (pad or flip):
            return self._plain(indices)
        pixels = F.pad(self._pixels(indices), (0, 0, pad, pad, pad, pad))
        count, padded_height, padded_width, channels = pixels.shape
        height, width = padded_height - 2 * pad, padded_width - 2 * pad
        # Window and mirror image are one gather: the row and the column that each output pixel comes from.
        top, left = torch.randint(0, 2 * pad + 1, (2, count, 1), generator=generator)
        columns = torch.arange(width).expand(count, width)
        if flip:
            mirrored = torch.randint(0, 2, (count, 1), generator=generator).bool()
            columns = torch.where(mirrored, columns.flip(1), columns)
        rows = torch.arange(0, count * padded_height, padded_height)[:, None] + top + torch.arange(height)
        places = (rows * padded_width)[:, :, None] + (left + columns)[:, None]
        window = pixels.view(-1, channels).index_select(0, places.flatten()).view(count, height, width, channels)
        return self.preprocessing.normalise(window.to(self.device))
