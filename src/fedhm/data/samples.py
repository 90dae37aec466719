"""Samples with what is to be learned of them, held whole in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhm.data.tokens import Tokens, joined
from fedhm.errors import FedhmError


@dataclass(frozen=True)
class Samples:
    """Samples: `inputs` (N, …), and `labels`: class numbers (N,), or numbers to predict (N,) or (N, outputs).

    Images are uint8 (N, C, H, W); text is sequences of tokens; any other input is taken as it is.
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
        """Return inputs that are one tensor."""
        assert isinstance(self.inputs, Tensor)
        return self.inputs

    @property
    def example(self) -> Tensor | Tokens:
        """Return one input that is like all others."""
        return self.inputs[self.inputs.typical()] if isinstance(self.inputs, Tokens) else self.inputs[0]

    @property
    def are_images(self) -> bool:
        return self.inputs.dtype == torch.uint8 and self.inputs.ndim == 4

    def subset(self, indices: Tensor) -> "Samples":
        inputs = self.inputs[indices]
        if isinstance(inputs, Tokens):
            return Samples(inputs, self.labels[indices])
        # as networks get images; who trains on them often need not turn them each time
        return Samples(
            inputs.contiguous(memory_format=torch.channels_last) if self.are_images else inputs, self.labels[indices]
        )


@dataclass(frozen=True)
class Source:
    """A data set as read from disk: samples to train on, samples to test on, and how to show them to a network."""

    train: Samples
    test: Samples
    classes: int
    mean: tuple[float, ...]  # per channel, of pixels in 0…1
    std: tuple[float, ...]


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of uint8 images (N, C, H, W), in units of 0…1, exactly.

    Counted over the 256 pixel values, so no float copy of the data set is made.
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
    return Samples(joined(tokens) if tokens else torch.cat([p.tensor for p in parts]), labels)
