"""From a user's values to tensors: arrays of any library, images of Pillow, and single samples of data sets."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from fedhm.errors import FedhmError
from fedhm.networks.inputs import Inputs

LABEL_NAMES = ("label", "labels", "target", "targets", "y", "class", "fine_label", "mask", "masks")
PAIRS = "pairs of an array and a class number, or numbers"


def is_frame(value: Any) -> bool:
    """Tell whether this is a table of pandas or polars."""
    return hasattr(value, "to_numpy") and hasattr(value, "columns")


def is_array(value: Any) -> bool:
    """Tell whether this is an array or a tensor with at least one axis, or a column of a table."""
    return (isinstance(value, Tensor | np.ndarray) or hasattr(value, "to_numpy")) and bool(np.ndim(value))


def frame_columns(frame: Any) -> dict[str, Any]:
    """Return the columns of a table as arrays."""
    return {str(name): frame[name].to_numpy() for name in frame.columns}


PLAIN = (bool, int, float, complex, list, tuple, range, array, memoryview, np.generic)
ARRAY_PROTOCOLS = ("__array__", "__array_interface__", "__dlpack__", "__cuda_array_interface__")


def as_tensor(value: Any) -> Tensor:
    """Return numbers as a dense tensor on the CPU; raise TypeError, ValueError or RuntimeError for anything else."""
    if isinstance(value, Image):  # (H, W) or (H, W, C) → (C, H, W)
        pixels = torch.from_numpy(np.array(value))
        return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    if isinstance(value, Tensor):
        plain = value.detach()
        plain = plain if type(plain) is Tensor else plain.as_subclass(Tensor)
        return plain if plain.is_meta else plain.cpu()
    return torch.as_tensor(_plain_array(value))


def as_target(value: Any) -> Tensor:
    """Return the target of one sample. A Pillow image is a mask, (H, W) without an axis of channels."""
    return torch.from_numpy(np.array(value)) if isinstance(value, Image) else as_tensor(value)


def _plain_array(value: Any) -> Any:
    """Return an array that torch takes without a copy or a warning, where that is possible."""
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.is_masked(value):
            raise ValueError("some values are masked: fill them in, or leave their samples out")
        value = value.data
    if not isinstance(value, np.ndarray):
        # torch would read any object with a length item by item, for hours if it has many
        if not (isinstance(value, PLAIN) or any(hasattr(value, name) for name in ARRAY_PROTOCOLS)):
            raise TypeError(f"a {type(value).__name__} is no array")
        return value
    if value.dtype == object:
        raise TypeError("an array of Python objects, such as texts or missing values")
    if value.dtype.kind not in "biufc":
        raise TypeError(f"an array of type {value.dtype}")
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    negative = any(stride < 0 for stride in value.strides)
    return value.copy() if negative or not value.flags.writeable else value


def as_inputs(value: Any) -> Inputs:
    """Return the input of one sample: a tensor, or several in a tuple or a mapping."""
    if isinstance(value, Mapping):
        return {str(name): as_tensor(each) for name, each in value.items()}
    if isinstance(value, tuple) and any(isinstance(each, Tensor | np.ndarray | Image) for each in value):
        return tuple(as_tensor(each) for each in value)
    return as_tensor(value)


def split_item(item: Any, whose: str) -> tuple[Any, Any]:
    """Return the input and the target of one sample: a pair, several inputs and a target, or named columns."""
    if isinstance(item, Mapping):
        label = label_column([str(name) for name in item], whose)
        return only_or_all({str(name): value for name, value in item.items() if str(name) != label}), item[label]
    if isinstance(item, tuple | list) and len(item) >= 2 and not isinstance(item[-1], str):
        *inputs, target = item
        return (inputs[0] if len(inputs) == 1 else tuple(inputs)), target
    raise FedhmError(f"the samples of {whose} must be {PAIRS}, not a {type(item).__name__}")


def only_or_all(columns: Mapping[str, Any]) -> Any:
    """Return the only column without its name, or all of several columns."""
    return next(iter(columns.values())) if len(columns) == 1 else dict(columns)


def label_column(names: Sequence[str], whose: str) -> str:
    """Return which of the named columns holds the labels."""
    found = [name for name in names if name.lower() in LABEL_NAMES or name.lower().endswith("_label")]
    if len(found) == 1 and len(names) > 1:
        return found[0]
    columns = ", ".join(f"'{name}'" for name in names[:12])
    if found:
        wrong = "has no column beside its labels" if len(names) == 1 else "has several columns that could be the labels"
        raise FedhmError(f"{whose} {wrong}, among {columns}: keep one column of labels, and the inputs")
    raise FedhmError(
        f"{whose} has the columns {columns or 'of an empty table'}, and none is called 'label', 'target' or 'y': "
        "rename the column of labels, or give a pair (inputs, labels)"
    )
