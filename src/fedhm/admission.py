"""What an update must satisfy before the server computes with it."""

import math

from fedhm.messages import Task, Update


def objection(update: Update, task: Task, classes: int) -> str | None:
    """Why `update` must not be merged as the answer to `task`; None if it may."""
    if (update.kind, update.round, update.client, update.network) != (
        task.kind,
        task.round,
        task.client,
        task.network,
    ):
        return f"it answers another task ({update.kind} of round {update.round} for network {update.network})"
    if update.samples < 1:
        return f"it claims {update.samples} samples"
    if update.labels is not None and not set(update.labels) <= set(range(classes)):
        return f"it claims labels outside 0…{classes - 1}"
    if not math.isfinite(update.loss):
        return f"its loss became {'NaN' if math.isnan(update.loss) else 'infinite'}"
    if task.kind == "train" and set(update.tensors) != set(task.tensors):
        odd = min(set(update.tensors) ^ set(task.tensors))
        return f"it {'lacks' if odd in task.tensors else 'adds'} the tensor '{odd}'"
    for name, tensor in update.tensors.items():
        if task.kind == "train":
            sent = task.tensors[name]
            if tensor.shape != sent.shape:
                return f"'{name}' has shape {tuple(tensor.shape)} instead of {tuple(sent.shape)}"
            if tensor.dtype != sent.dtype:
                return f"'{name}' has type {tensor.dtype} instead of {sent.dtype}"
        if not bool(tensor.isfinite().all()):
            return f"'{name}' holds NaN or infinite values"
    return None
