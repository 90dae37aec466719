"""A batch in parts: their gradients add up to the batch's, and only one part's activations are in memory at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedhm.networks.inputs import Inputs, rows_of

Loss = Callable[[Inputs, Tensor], Tensor]  # mean over the inputs and targets of a part


def backward(loss_of: Loss, inputs: Inputs, targets: Tensor, most: int, trained: Sequence[nn.Parameter]) -> Tensor:
    """Leave the gradient of a batch's mean loss in the parameters, and return that loss.

    most  samples in a part; 0: the whole batch is one
    """
    if not most or len(targets) <= most:
        loss = loss_of(inputs, targets)
        loss.backward()
        return loss.detach()
    total = torch.zeros((), device=targets.device)
    before = 0
    for rows in split(torch.arange(len(targets), device=targets.device), most):
        # Not losses are weighted but what they add to: whatever else a loss does to gradients is weighted with it.
        _scale(trained, before / len(rows))
        loss = loss_of(rows_of(inputs, rows), targets[rows])
        loss.backward()
        total = total + loss.detach() * (len(rows) / len(targets))
        before = len(rows)
    _scale(trained, before / len(targets))
    return total


def split(order: Tensor, size: int) -> list[Tensor]:
    """Split into batches; a single last sample joins the batch before: BatchNorm has no variance of a single value."""
    parts = list(order.split(size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


@torch.no_grad()
def _scale(trained: Sequence[nn.Parameter], share: float) -> None:
    if share != 1:
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.mul_(share)
