"""What an update must satisfy before the server computes with it: the door that the replies of every engine go through.

An update may come from a client that diverged, that is broken, or that means harm. So nothing in it is trusted, not
even that its values are of their types; and its numbers are bounded, since a single 1e38 leaves nothing of a mean.
"""

import math
import reprlib
from collections.abc import Iterable, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Task, Update

LARGEST_SCORE = 1e6  # a logit
LARGEST_LOSS = 1e30  # sums of such are finite
LARGEST_MEAN = 1e10  # of what a BatchNorm layer sees, perhaps raw inputs; of a variance, the square of it

_short = reprlib.Repr()  # what a client wrote may be of any length
_short.maxstring = 80


@dataclass(frozen=True)
class Expected:
    """What the server knows of an answer beforehand."""

    tensors: Tensors  # of the answer's names, shapes and types; of statistics, `values` are those that one sample gives
    samples: int  # of the client; 0: it has not said yet
    classes: int
    labelled: bool = False  # it says which labels its client holds
    running: Set[str] = frozenset()  # the names of running averages among the weights
    max_change: float = 0.0  # norm of the change of all weights, in units of what was sent; 0 is no limit


def objection(update: Update, task: Task, expected: Expected) -> str | None:
    """Why `update` must not be merged as the answer to `task`; None if it may."""
    reason = (
        _other_task(update, task)
        or _claim(update, expected)
        or _misfit(update.tensors, expected.tensors)
        or _misfit(update.kept, task.kept)
    )
    if reason is None and task.kind == "train":
        reason = _change(update.tensors, task.tensors, expected)
    elif reason is None:
        reason = _beyond_bounds(update, expected)
    return reason or _change(update.kept, task.kept, expected)


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
    """Whether these are the tensors that they should be, whatever their values."""
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
    """In memory as it stands: what else claims to be a tensor may raise, or be another one, when computed with."""
    if type(tensor) is not Tensor or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    apart = tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return tensor.device.type == "cpu" and not apart and tensor.is_contiguous()


def _change(tensors: Tensors, sent: Tensors, expected: Expected) -> str | None:
    squares = 0.0
    for name, tensor in tensors.items():
        if name in expected.running:
            if reason := _outside(name, tensor, *_moments(name.endswith("running_var"))):
                return reason
        else:
            distance = _distance(tensor, sent[name])
            if math.isnan(distance):
                return f"'{name}' holds NaN or infinite values"
            squares += distance * distance
    change, most = math.sqrt(squares), expected.max_change
    # The norm of what was sent need not be known of a change that would be small enough for any.
    if most and change > most and change > most * _norm(t for name, t in sent.items() if name not in expected.running):
        return f"its change has norm {change:.1e}, over {most:g} × that of what was sent"
    return None


def _distance(tensor: Tensor, sent: Tensor) -> float:
    """‖tensor − sent‖; NaN if `tensor` is not finite. Where the type's own range is too small, in float64."""
    if tensor.element_size() > 2 and math.isfinite(distance := torch.dist(tensor, sent).item()):
        return distance
    return torch.dist(tensor.double(), sent.double()).item() if bool(tensor.isfinite().all()) else math.nan


def _norm(tensors: Iterable[Tensor]) -> float:
    """Of all of them together."""
    return math.hypot(*(torch.linalg.vector_norm(tensor, dtype=torch.float64).item() for tensor in tensors))


def _beyond_bounds(update: Update, expected: Expected) -> str | None:
    for name, tensor in update.tensors.items():
        part = name.rpartition("/")[2]
        if update.kind == "distil":
            lowest, highest = -LARGEST_SCORE, LARGEST_SCORE
        elif part == "values":  # a network may compute what does not depend on its batch, of two samples at least
            lowest, highest = 1.0, expected.tensors[name].item() * max(2, update.samples)
        else:
            lowest, highest = _moments(part == "variance")
        if reason := _outside(name, tensor, lowest, highest):
            return reason
    return None


def _moments(variance: bool) -> tuple[float, float]:
    return (0.0, LARGEST_MEAN**2) if variance else (-LARGEST_MEAN, LARGEST_MEAN)


def _outside(name: str, tensor: Tensor, lowest: float, highest: float) -> str | None:
    if not tensor.numel():
        return None
    smallest, largest = (value.item() for value in tensor.aminmax())
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        return f"'{name}' holds NaN or infinite values"
    if lowest <= smallest and largest <= highest:
        return None
    return f"'{name}' has the value {smallest if smallest < lowest else largest:.3g}, not in {lowest:g}…{highest:g}"
