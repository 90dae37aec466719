"""Samples in memory, and batches of them: gathered, augmented and normalised as tensors, in this process."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhm.data.tokens import TARGETS, Tokens, concatenate_tokens
from fedhm.errors import FedhmError
from fedhm.machine.device import CPU, copy_to_device, free_memory
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
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.labels.nbytes

    def to(self, device: torch.device) -> "Samples":
        return Samples(self.inputs.to(device), self.labels.to(device))

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


class SampleCache:
    """Samples that stay on a device between tasks, as many as fit; the least recently used go first.

    It holds the samples on the host as well: their identity tells them apart.

    most  bytes; None: half of what is free on the device when the first samples come
    """

    def __init__(self, device: torch.device, most: int | None = None) -> None:
        self.device, self._most, self._used = device, most, 0
        self._held: dict[int, tuple[Samples, Samples]] = {}  # on the host and on the device, least recently used first

    def find(self, samples: Samples) -> Samples | None:
        """Return samples on the device, copied there if need be; None if they do not fit."""
        if self._most is None:
            self._most = free_memory(self.device) // 2
        if samples.nbytes > self._most:
            return None
        held = self._held.pop(id(samples), None)
        if held is None:
            self._used += samples.nbytes
            while self._used > self._most:
                oldest, _ = self._held.pop(next(iter(self._held)))
                self._used -= oldest.nbytes
            held = samples, samples.to(self.device)
        self._held[id(samples)] = held
        return held[1]


@dataclass(frozen=True)
class _Draw:
    """What chance decides about a batch. It is drawn on the CPU, so that batches are the same on every device."""

    indices: Tensor  # (B,)
    moves: Tensor | None = None  # (2 or 3, B): top and left of each window, and whether the image is mirrored


class Feed:
    """Samples that are drawn in batches on a device.

    With a cache, samples stay on the device and batches are made there: after their chances were copied, for all
    batches at once, no batch waits for the host. Without one, batches are made on the host and copied.
    """

    def __init__(
        self,
        samples: Samples,
        preprocessing: Preprocessing,
        device: torch.device = CPU,
        cache: SampleCache | None = None,
    ) -> None:
        self.samples, self.preprocessing, self.device, self._cache = samples, preprocessing, device, cache

    def on(self, device: torch.device, cache: SampleCache | None = None) -> "Feed":
        return Feed(self.samples, self.preprocessing, device, cache)

    def shuffled(self, size: int, generator: torch.Generator, steps: int | None = None) -> Iterator[Batch]:
        """Yield random batches, augmented: those of one epoch, or `steps` of as many epochs as that takes."""
        epochs = (self._draws(size, generator) for _ in repeat(None))
        draws = next(epochs) if steps is None else islice(chain.from_iterable(epochs), steps)
        return self._made(draws)

    def ordered(self, size: int) -> Iterator[Batch]:
        """Yield every sample once, in order and not augmented; sequences in the order of their lengths."""
        inputs = self.samples.inputs
        if isinstance(inputs, Tokens):
            return self._made(map(_Draw, inputs.by_length(size)))
        return self._made(map(_Draw, split_batches(torch.arange(len(self.samples)), size)))

    def one(self) -> Batch:
        """Return a batch of one typical sample: the first, or a sequence of median length."""
        inputs = self.samples.inputs
        draw = _Draw(inputs.median_index() if isinstance(inputs, Tokens) else torch.zeros(1, dtype=torch.int64))
        return next(self._made([draw]))

    def _draws(self, size: int, generator: torch.Generator) -> Iterator[_Draw]:
        """Draw the batches of one epoch, each when it is asked for."""
        if isinstance(self.samples.inputs, Tokens):
            yield from map(_Draw, self.samples.inputs.buckets(size, generator))
            return
        pad, flip = self.preprocessing.crop, self.preprocessing.flip
        augmented = self.samples.are_images and (pad or flip)
        for indices in split_batches(torch.randperm(len(self.samples), generator=generator), size):
            if not augmented:
                yield _Draw(indices)
                continue
            moves = torch.randint(0, 2 * pad + 1, (2, len(indices)), generator=generator)
            if flip:
                moves = torch.cat([moves, torch.randint(0, 2, (1, len(indices)), generator=generator)])
            yield _Draw(indices, moves)

    def _made(self, draws: Iterable[_Draw]) -> Iterator[Batch]:
        held = self._cache.find(self.samples) if self._cache and self.device != CPU else None
        if held is None:
            for draw in draws:
                inputs, targets = _batch(self.samples, draw, self.preprocessing, self._longest(draw), self.device)
                yield inputs, targets
            return
        draws = list(draws)
        longest = [self._longest(draw) for draw in draws]  # of sequences, known on the host: nothing waits for it
        for draw, length in zip(_moved(draws, self.device), longest, strict=True):
            yield _batch(held, draw, self.preprocessing, length, self.device)

    def _longest(self, draw: _Draw) -> int:
        inputs = self.samples.inputs
        return inputs.longest(draw.indices) if isinstance(inputs, Tokens) else 0


def _moved(draws: Sequence[_Draw], device: torch.device) -> Iterator[_Draw]:
    """Move the chances of many batches to a device in one copy."""
    if not draws:
        return
    rows = [d.indices[None] if d.moves is None else torch.cat([d.indices[None], d.moves]) for d in draws]
    for part in copy_to_device(torch.cat(rows, 1), device).split([len(d.indices) for d in draws], 1):
        yield _Draw(part[0], part[1:] if len(part) > 1 else None)


def _batch(samples: Samples, draw: _Draw, preprocessing: Preprocessing, longest: int, device: torch.device) -> Batch:
    """Make a batch where the samples are, and return it on the device."""
    labels = samples.labels.index_select(0, draw.indices)
    if isinstance(samples.inputs, Tokens):
        batch = samples.inputs.padded(draw.indices, longest)
        targets = batch.pop(TARGETS, labels)  # of each token, if there are any
        return {name: copy_to_device(tensor, device) for name, tensor in batch.items()}, copy_to_device(targets, device)
    if not samples.are_images:
        inputs = copy_to_device(samples.tensor.index_select(0, draw.indices), device)
        return inputs, copy_to_device(labels, device)
    pixels = _pixels(samples.tensor, draw.indices)
    if draw.moves is not None:
        pixels = _window(pixels, draw.moves, preprocessing.crop)
    return preprocessing.normalise(copy_to_device(pixels, device)), copy_to_device(labels, device)


def _pixels(images: Tensor, indices: Tensor) -> Tensor:
    """Return pixels as (B, H, W, C); only the batch is permuted if the images have another memory layout."""
    whole = images.permute(0, 2, 3, 1)
    if whole.is_contiguous():
        return whole.index_select(0, indices)
    return images.index_select(0, indices).permute(0, 2, 3, 1).contiguous()


def _window(pixels: Tensor, moves: Tensor, pad: int) -> Tensor:
    """Cut a window out of each padded image (B, H, W, C), and mirror some of them."""
    device = pixels.device
    pixels = F.pad(pixels, (0, 0, pad, pad, pad, pad))
    count, padded_height, padded_width, channels = pixels.shape
    height, width = padded_height - 2 * pad, padded_width - 2 * pad
    # Window and mirror image are one gather: the row and the column that each output pixel comes from.
    top, left = moves[0][:, None], moves[1][:, None]
    columns = torch.arange(width, device=device).expand(count, width)
    if len(moves) > 2:
        columns = torch.where(moves[2][:, None].bool(), columns.flip(1), columns)
    first = torch.arange(0, count * padded_height, padded_height, device=device)[:, None]
    rows = first + top + torch.arange(height, device=device)
    places = (rows * padded_width)[:, :, None] + (left + columns)[:, None]
    return pixels.view(-1, channels).index_select(0, places.flatten()).view(count, height, width, channels)
