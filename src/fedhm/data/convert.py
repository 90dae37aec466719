"""Converts users' data to samples: arrays, tensors, map-style data sets, text."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import Dataset

from fedhm.config.objective import Objective
from fedhm.data.samples import Samples
from fedhm.data.text import TextReader, to_text
from fedhm.errors import FedhmError
from fedhm.seeds import numpy_generator

WANTED = "pairs of an array and a class number, or numbers"
# One client's data: samples, a pair of arrays, or a map-style data set of (input, label). Text is a tokenizer's result
# with labels, a data set of Hugging Face or of dicts, or texts with labels.
DataLike = Samples | tuple[Any, Any] | Dataset[Any]
PublicLike = DataLike | Tensor | np.ndarray[Any, Any]  # inputs may come without labels


def to_samples(
    data: DataLike, whose: str, dtype: torch.dtype, objective: Objective, reader: TextReader | None = None
) -> Samples:
    """Return a user's samples; floating-point inputs are converted to `dtype`, and `reader` tokenizes texts."""
    text = to_text(data, whose, objective.per_token, reader)
    given: Any = data
    if text is None and not isinstance(data, Samples | tuple):
        given = _rows(data, whose)
        if given and isinstance(given[0], Mapping):
            text = to_text(_as_columns(given, whose), whose, objective.per_token, reader)
    if text is not None:
        return Samples(text.tokens, objective.as_targets(text.labels, whose, dtype))
    inputs, labels = (_dense(tensor, whose) for tensor in _as_arrays(given, whose))
    return Samples(_converted(inputs, dtype), objective.as_targets(labels, whose, dtype))


def to_public_samples(data: PublicLike, dtype: torch.dtype) -> Samples:
    """Return public samples in random order: sorted ones would give BatchNorm batches of one label."""
    if isinstance(data, Tensor | np.ndarray):
        if not data.ndim:
            raise FedhmError("the public set must be an array of inputs, not a single number")
        data = (data, np.zeros(len(data)))
    inputs = _dense(_as_arrays(data, "the public set")[0], "the public set")
    samples = Samples(_converted(inputs, dtype), torch.zeros(len(inputs), dtype=torch.int64))
    return samples.subset(torch.from_numpy(numpy_generator(0, "public").permutation(len(samples))))


def _as_arrays(data: DataLike, whose: str) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of a user's data."""
    if isinstance(data, Samples):
        return data.tensor, data.labels
    if isinstance(data, tuple) and len(data) == 2:
        try:
            return torch.as_tensor(data[0]), torch.as_tensor(data[1])
        except (TypeError, ValueError, RuntimeError) as error:
            raise FedhmError(f"the inputs and labels of {whose} must be arrays of numbers: {error}") from None
    pairs = _rows(data, whose)
    try:
        images = [_as_tensor(pair[0]) for pair in pairs]
        labels = [torch.as_tensor(pair[1]) for pair in pairs]
    except Exception as error:  # a user's data set may hold anything
        raise FedhmError(f"the samples of {whose} must be {WANTED}: {error!r}") from error
    if not pairs:
        raise FedhmError(f"{whose} has no samples")
    if any(x.shape != images[0].shape for x in images) or any(y.shape != labels[0].shape for y in labels):
        raise FedhmError(f"the samples of {whose} differ in shape: bring them to one size first")
    return torch.stack(images), torch.stack(labels)


def _rows(data: Any, whose: str) -> list[Any]:
    """Return all items of a map-style data set. Each is read once: it may be drawn at random."""
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(data, str):
        kind = type(data).__name__
        raise FedhmError(f"{whose} must be a pair (inputs, labels) or a dataset with a length, not a {kind}")
    try:
        return [data[index] for index in range(len(data))]
    except Exception as error:  # a user's data set may raise anything
        raise FedhmError(f"the samples of {whose} must be {WANTED}: {error!r}") from error


def _as_columns(rows: list[Any], whose: str) -> dict[str, list[Any]]:
    """Return the columns of a data set of dicts."""
    names = [str(name) for name in rows[0]]
    if any(not isinstance(row, Mapping) or set(row) != set(rows[0]) for row in rows):
        raise FedhmError(f"the samples of {whose} must all have the entries of the first, {', '.join(names)}")
    return {name: [row[name] for row in rows] for name in rows[0]}


def _dense(tensor: Tensor, whose: str) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        raise FedhmError(f"the inputs and labels of {whose} must be plain dense tensors: bring them to that form first")
    return tensor


def _converted(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Image):  # of torchvision's data sets: (H, W) or (H, W, C) → (C, H, W)
        pixels = torch.from_numpy(np.array(value))
        return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    return torch.as_tensor(value)
