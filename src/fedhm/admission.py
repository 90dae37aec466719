"""What an update must satisfy before the server computes with it."""

import math

from fedhm.messages import Task, Tensors, Update


def objection(update: Update, task: Task, expected: Tensors, classes: int) -> str | None:
    """Why `update` must not be merged as the answer to `task`; None if it may.

    `expected` has the names, shapes and types that the answer's tensors must have; what a client keeps stays as it is.
    """
    asked = (task.kind, task.round, task.client, task.tier, task.network)
    if (update.kind, update.round, update.client, update.tier, update.network) != asked:
        return f"it answers another task ({update.kind} of round {update.round} for network {update.network})"
    if update.samples < 1:
        return f"it claims {update.samples} samples"
    if update.labels is not None and not set(update.labels) <= set(range(classes)):
        return f"it claims labels outside 0…{classes - 1}"
    if not math.isfinite(update.loss):
        return f"its loss became {'NaN' if math.isnan(update.loss) else 'infinite'}"
    return _misfit(update.tensors, expected, task.kind == "statistics") or _misfit(update.kept, task.kept)


def _misfit(tensors: Tensors, expected: Tensors, statistics: bool = False) -> str | None:
    if set(tensors) != set(expected):
        odd = min(set(tensors) ^ set(expected))
        return f"it {'lacks' if odd in expected else 'adds'} the tensor '{odd}'"
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            return f"'{name}' has shape {tuple(tensor.shape)} instead of {tuple(expected[name].shape)}"
        if tensor.dtype != expected[name].dtype:
            return f"'{name}' has type {tensor.dtype} instead of {expected[name].dtype}"
        # A sum is finite only if all is, and takes a third of the time; one that overflowed proves nothing.
        if not math.isfinite(tensor.sum().item()) and not bool(tensor.isfinite().all()):
            return f"'{name}' holds NaN or infinite values"
        if statistics and _impossible(name, tensor.min().item()):
            return f"'{name}' is below what statistics can be"
    return None


def _impossible(name: str, smallest: float) -> bool:
    """A layer saw at least one value, and no variance is negative."""
    return smallest < (1 if name.endswith("/values") else 0) and not name.endswith("/mean")
