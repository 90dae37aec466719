"""A federation's data: one set of samples per client, and a test set at the server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import Dataset

from fedhm.config import DataConfig
from fedhm.data.batches import Preprocessing
from fedhm.data.partition import PARTITIONS
from fedhm.data.samples import Samples, channel_statistics, concatenate
from fedhm.data.sources import read_source
from fedhm.errors import FedhmError
from fedhm.seeds import numpy_generator

# What a user may hand in for one client: samples, a pair of arrays, or a map-style dataset of (input, label)
DataLike = Samples | tuple[Any, Any] | Dataset[Any]


@dataclass(frozen=True)
class Federation:
    clients: Sequence[Samples]
    test: Samples
    classes: int
    preprocessing: Preprocessing

    def __post_init__(self) -> None:
        if not self.clients:
            raise FedhmError("a federation needs at least one client")
        if not len(self.test):
            raise FedhmError("the test set is empty")
        for number, samples in enumerate(self.clients):
            if not len(samples):
                raise FedhmError(
                    f"client {number} has no samples: use fewer clients, a larger data.alpha, or "
                    "data.partition = 'dirichlet', which gives every client the same number"
                )
        for name, samples in [
            ("the test set", self.test),
            *((f"client {i}", s) for i, s in enumerate(self.clients)),
        ]:
            if samples.labels.min() < 0 or samples.labels.max() >= self.classes:
                raise FedhmError(f"{name} has labels outside 0…{self.classes - 1}")
            if samples.inputs.shape[1:] != self.test.inputs.shape[1:]:
                raise FedhmError(
                    f"{name} has inputs of shape {tuple(samples.inputs.shape[1:])}, "
                    f"the test set of shape {tuple(self.test.inputs.shape[1:])}"
                )

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.test.inputs.shape[1:])


def partitioned(config: DataConfig, clients: int, seed: int) -> Federation:
    """Reads the data set that `config` names and deals it out."""
    source = read_source(config.source, config.folder)
    if clients > len(source.train):
        raise FedhmError(f"{clients} clients cannot share {len(source.train)} samples: at least one each is needed")
    labels: np.ndarray[Any, np.dtype[np.int64]] = source.train.labels.numpy()
    rng = numpy_generator(seed, "partition")
    parts = PARTITIONS[config.partition](labels, clients, config.alpha, rng)
    return Federation(
        [source.train.subset(torch.from_numpy(part)) for part in parts],
        source.test,
        source.classes,
        Preprocessing(source.mean, source.std, config.crop, config.flip),
    )


def gathered(
    clients: Sequence[DataLike], test: DataLike, classes: int | None = None, crop: int = 0, flip: bool = False
) -> Federation:
    """A federation from a user's own data sets. Images in uint8 (N, C, H, W) are normalised, other input is not."""
    own = [_as_samples(data, f"client {number}") for number, data in enumerate(clients)]
    own_test = _as_samples(test, "the test set")
    if classes is None:
        classes = 1 + max(int(s.labels.max()) for s in [*own, own_test] if len(s))
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if own and own[0].are_images:
        mean, std = channel_statistics(concatenate(own).inputs)
    return Federation(own, own_test, classes, Preprocessing(mean, std, crop, flip))


def _as_samples(data: DataLike, whose: str) -> Samples:
    if isinstance(data, Samples):
        return data
    if isinstance(data, tuple) and len(data) == 2:
        return Samples(torch.as_tensor(data[0]), torch.as_tensor(data[1]).long())
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(data, str):
        kind = type(data).__name__
        raise FedhmError(f"{whose} must be a pair (inputs, labels) or a dataset with a length, not a {kind}")
    try:
        pairs = [data[index] for index in range(len(data))]
        inputs = [_as_tensor(pair[0]) for pair in pairs]
        labels = [int(pair[1]) for pair in pairs]
    except (TypeError, ValueError, IndexError) as error:
        raise FedhmError(f"the samples of {whose} must be pairs of an array and a class number: {error}") from None
    if not pairs:
        raise FedhmError(f"{whose} has no samples")
    if any(x.shape != inputs[0].shape for x in inputs):
        raise FedhmError(f"the samples of {whose} differ in shape: bring them to one size first")
    return Samples(torch.stack(inputs), torch.tensor(labels))


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Image):  # (H, W) or (H, W, C) → (C, H, W), as torchvision's data sets hold them
        pixels = torch.from_numpy(np.array(value))
        return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    return torch.as_tensor(value)
