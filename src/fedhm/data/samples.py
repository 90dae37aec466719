"""Samples, and batches of them: gathered or read, augmented and normalised as tensors, in this process."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import chain, islice, repeat
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhm.data.columns import Columns, concatenate_columns
from fedhm.data.lazy import LazyInputs
from fedhm.data.tokens import TARGETS, Tokens, concatenate_tokens
from fedhm.errors import FedhmError
from fedhm.machine.device import CPU, CopiedTensors, CopyStream, copy_to_device, free_memory
from fedhm.networks.inputs import Inputs, map_tensors, require_tensor, tensors_of
from fedhm.networks.saving import split_batches


@dataclass(frozen=True)
class Samples:
    """Inputs (N, …), and labels: class numbers (N,) or of every pixel (N, H, W), or numbers (N, …).

    Images are uint8 (N, C, H, W), and text is `Tokens`. Several tensors for each sample are `Columns`, and a data set
    that is read when a batch needs it is `LazyInputs`: its labels here are those of one read, for checks. Any other
    input is used unchanged.
    """

    inputs: Tensor | Tokens | Columns | LazyInputs
    labels: Tensor

    def __post_init__(self) -> None:
        numbers = self.labels.is_floating_point()
        right = self.labels.ndim >= 1 if numbers else self.labels.ndim == 1 or self.labels.ndim > 2
        right = right and (self.labels.numel() > 0 or not len(self.labels))
        if not right or not self.inputs.ndim or len(self.labels) != len(self.inputs):
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
        """Return the inputs, which are one tensor in memory."""
        assert isinstance(self.inputs, Tensor)
        return self.inputs

    @property
    def example(self) -> Tensor | Tokens:
        """Return one typical input."""
        if isinstance(self.inputs, Tokens):
            return self.inputs[self.inputs.median_index()]
        given = self.inputs.first if isinstance(self.inputs, LazyInputs) else self.inputs
        return require_tensor(given, "a server without samples")[0]

    @property
    def are_lazy(self) -> bool:
        return isinstance(self.inputs, LazyInputs)

    @property
    def nbytes(self) -> int:
        """Return the bytes in memory."""
        return self.labels.nbytes + (0 if isinstance(self.inputs, LazyInputs) else self.inputs.nbytes)

    def to(self, device: torch.device) -> "Samples":
        inputs = self.inputs if isinstance(self.inputs, LazyInputs) else self.inputs.to(device)
        return Samples(inputs, self.labels.to(device))

    @property
    def are_images(self) -> bool:
        """Tell whether inputs are uint8 images, which are normalised and may be augmented."""
        if isinstance(self.inputs, Columns) or (isinstance(self.inputs, LazyInputs) and not self.inputs.is_one_tensor):
            return False
        return self.inputs.dtype == torch.uint8 and self.inputs.ndim == 4

    def subset(self, indices: Tensor) -> "Samples":
        inputs = self.inputs[indices]
        if not isinstance(inputs, Tensor):
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
    return _statistics(_pixel_counts(images))


def pooled_channel_statistics(parts: Sequence[Samples]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of the images of all parts; of lazy ones, of some images."""
    images = (image for part in parts for image in _images_of(part))
    return _statistics(reduce(add, map(_pixel_counts, images)))


def _images_of(samples: Samples) -> Iterable[Tensor]:
    return samples.inputs.some_images() if isinstance(samples.inputs, LazyInputs) else [samples.tensor]


def _pixel_counts(images: Tensor) -> Tensor:
    """Count the pixel values of each channel: (C, 256)."""
    counts = [torch.bincount(images[:, channel].flatten(), minlength=256) for channel in range(images.shape[1])]
    return torch.stack(counts)


def _statistics(all_counts: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    values = torch.arange(256, dtype=torch.float64) / 255
    means: list[float] = []
    deviations: list[float] = []
    for counts in all_counts.double():
        mean = (counts * values).sum() / counts.sum()
        variance = (counts * (values - mean) ** 2).sum() / counts.sum()
        means.append(mean.item())
        deviations.append(max(variance.sqrt().item(), 1e-6))  # a constant channel must not divide by zero
    return tuple(means), tuple(deviations)


def concatenate(parts: Sequence[Samples]) -> Samples:
    labels = torch.cat([p.labels for p in parts])
    if tokens := [p.inputs for p in parts if isinstance(p.inputs, Tokens)]:
        return Samples(concatenate_tokens(tokens), labels)
    if columns := [p.inputs for p in parts if isinstance(p.inputs, Columns)]:
        return Samples(concatenate_columns(columns), labels)
    return Samples(torch.cat([p.tensor for p in parts]), labels)


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
    seed: int = 0  # of random transforms, if samples are read now


class Feed:
    """Samples that are drawn in batches on a device.

    With a cache, samples stay on the device and batches are made there: after their chances were copied, for all
    batches at once, no batch waits for the host. Without one, batches are made on the host, and each is copied during
    the step on the batch before it.
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
            # a draw more only where it is used: batches of arrays stay what they were
            seed = int(torch.randint(2**62, (), generator=generator)) if self.samples.are_lazy else 0
            if not augmented:
                yield _Draw(indices, seed=seed)
                continue
            moves = torch.randint(0, 2 * pad + 1, (2, len(indices)), generator=generator)
            if flip:
                moves = torch.cat([moves, torch.randint(0, 2, (1, len(indices)), generator=generator)])
            yield _Draw(indices, moves, seed)

    def _made(self, draws: Iterable[_Draw]) -> Iterator[Batch]:
        kept = self._cache is not None and self.device != CPU and not self.samples.are_lazy
        held = self._cache.find(self.samples) if self._cache is not None and kept else None
        if held is None:
            gathered = (_gather(self.samples, draw, self.preprocessing, self._longest(draw)) for draw in draws)
            copied = gathered if self.device == CPU else _copied_ahead(gathered, self.device)
            for batch in copied:
                yield batch.inputs(self.preprocessing), batch.targets
            return
        draws = list(draws)
        longest = [self._longest(draw) for draw in draws]  # of sequences, known on the host: nothing waits for it
        for draw, length in zip(_moved(draws, self.device), longest, strict=True):
            batch = _gather(held, draw, self.preprocessing, length)
            yield batch.inputs(self.preprocessing), batch.targets

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


@dataclass(frozen=True)
class _Gathered:
    """A batch as it is copied to a device: pixels (B, H, W, C) as they are stored, or inputs of any other kind."""

    raw: Inputs
    targets: Tensor
    pixels: bool = False

    def inputs(self, preprocessing: Preprocessing) -> Inputs:
        """Return what networks take; pixels are normalised where they are."""
        return preprocessing.normalise(require_tensor(self.raw, "images")) if self.pixels else self.raw


def _gather(samples: Samples, draw: _Draw, preprocessing: Preprocessing, longest: int) -> _Gathered:
    """Make a batch where the samples are. Lazy samples are read now."""
    if isinstance(samples.inputs, LazyInputs):
        read, targets = samples.inputs.read(draw.indices, draw.seed)
        if not samples.are_images:
            return _Gathered(read, targets)
        whole = require_tensor(read, "images").permute(0, 2, 3, 1).contiguous()
        return _Gathered(_moved_window(whole, draw, preprocessing), targets, pixels=True)
    labels = samples.labels.index_select(0, draw.indices)
    if isinstance(samples.inputs, Columns):
        return _Gathered(map_tensors(lambda t: t.index_select(0, draw.indices), samples.inputs.batch()), labels)
    if isinstance(samples.inputs, Tokens):
        batch = samples.inputs.padded(draw.indices, longest)
        targets = batch.pop(TARGETS, labels)  # of each token, if there are any
        return _Gathered(batch, targets)
    if not samples.are_images:
        return _Gathered(samples.tensor.index_select(0, draw.indices), labels)
    pixels = _pixels(samples.tensor, draw.indices)
    return _Gathered(_moved_window(pixels, draw, preprocessing), labels, pixels=True)


def _copied_ahead(batches: Iterable[_Gathered], device: torch.device) -> Iterator[_Gathered]:
    """Yield batches on a device. The copy of the next one has begun by then: it overlaps with the step on this one."""
    stream, begun = CopyStream(device), None
    for batch in batches:
        after = batch, stream.copy([*tensors_of(batch.raw), batch.targets])
        if begun is not None:
            yield _arrived(*begun)
        begun = after
    if begun is not None:
        yield _arrived(*begun)


def _arrived(batch: _Gathered, copied: CopiedTensors) -> _Gathered:
    *raw, targets = copied.wait()
    arrived = iter(raw)
    return _Gathered(map_tensors(lambda _: next(arrived), batch.raw), targets, batch.pixels)


def _moved_window(pixels: Tensor, draw: _Draw, preprocessing: Preprocessing) -> Tensor:
    """Return pixels as they were drawn: cropped and flipped, or as they are."""
    return pixels if draw.moves is None else _window(pixels, draw.moves, preprocessing.crop)


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
