"""What an update must satisfy before the server computes with it: the replies of every engine are checked here.

An update may come from a client that diverged, that is broken, or that means harm. So nothing in it is trusted, not
even that its values are of their types; and its numbers are bounded, since a single 1e38 leaves nothing of a mean.
"""

import math
import reprlib

import torch
from torch import Tensor

from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Task, Update
from fedhm.work.work import LARGEST_LOSS, Expected, change, work_of

_short = reprlib.Repr()  # what a client wrote may be of any length
_short.maxstring = 80


def objection(update: Update, task: Task, expected: Expected) -> str | None:
    """Return why `update` must not be merged as the answer to `task`; None if it may."""
    reason = (
        _other_task(update, task)
        or _claim(update, expected)
        or _misfit(update.tensors, expected.tensors)
        or _misfit(update.kept, task.kept)
    )
    return reason or work_of(task.kind).objection(update, task, expected) or change(update.kept, task.kept, expected)


def _other_task(update: Update, task: Task) -> str | None:
    for name in ("kind", "round", "client", "tier", "network"):
        asked, answered = getattr(task, name), getattr(update, name)
        if type(answered) is not type(asked) or answered != asked:
            return f"it answers another task, of {name} {_short.repr(answered)} instead of {_short.repr(asked)}"
    return None


def _claim(update: Update, expected: Expected) -> str | None:
    samples, labels, loss = update.samples, update.labels, update.loss
    if type(samples) is not int or samples < 1 or samples != (expected.samples or samples):
        return f"it claims {_short.repr(samples)} samples instead of {expected.samples or 'some'}"
    if (labels is not None) != expected.labelled:
        return f"it {'does not say' if expected.labelled else 'says'} which labels it holds"
    if labels is not None:
        if not isinstance(labels, tuple | list) or not all(type(label) is int for label in labels):
            return f"its labels are {_short.repr(labels)}, not class numbers"
        if len(set(labels)) < max(1, len(labels)):
            return "it claims a label twice" if labels else "it claims to hold no label"
        if min(labels) < 0 or max(labels) >= expected.classes:
            return f"it claims labels outside 0…{expected.classes - 1}"
    if not isinstance(loss, float):
        return f"its loss is {_short.repr(loss)}, not a number"
    if not math.isfinite(loss):
        return f"its loss became {'NaN' if math.isnan(loss) else 'infinite'}"
    if abs(loss) > LARGEST_LOSS:
        return f"its loss is {loss:.0e}"
    return None


def _misfit(tensors: Tensors, expected: Tensors) -> str | None:
    """Return why these are not the expected tensors, whatever their values; None if they are."""
    if not isinstance(tensors, dict):
        return f"it has {_short.repr(tensors)} in place of tensors"
    if odd := tensors.keys() ^ expected.keys():
        name = min(odd, key=repr)
        return f"it {'lacks' if name in expected else 'adds'} the tensor {_short.repr(name)}"
    for name, tensor in tensors.items():
        if not _is_plain(tensor):
            return f"'{name}' is not a plain dense tensor"
        if tensor.shape != expected[name].shape:
            return f"'{name}' has shape {_short.repr(tuple(tensor.shape))} instead of {tuple(expected[name].shape)}"
        if tensor.dtype != expected[name].dtype:
            return f"'{name}' has type {tensor.dtype} instead of {expected[name].dtype}"
    return None


def _is_plain(tensor: object) -> bool:
    """Tell whether a tensor lies in memory as it stands: any other may raise, or be another one, when computed with."""
    if type(tensor) is not Tensor or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    apart = tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return tensor.device.type == "cpu" and not apart and tensor.is_contiguous()
