"""What goes into a network and what comes out: one tensor, or several by their names, as transformers have them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedhm.errors import FedhmError

Inputs = Tensor | dict[str, Tensor]  # a batch: what has names is passed by these


def scores(forward: Callable[..., Any], inputs: Inputs, when: str = "") -> Tensor:
    """Return the scores that a network gives for a batch: its output, or that output's `logits`."""
    output = forward(**inputs) if isinstance(inputs, dict) else forward(inputs)
    found = output if isinstance(output, Tensor) else getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise FedhmError(f"{when}the model must give a tensor of scores, not a {type(found).__name__}")
    return found


def one_tensor(inputs: Inputs | object, what: str) -> Tensor:
    """Return inputs that are one tensor; of texts, which are several, say that `what` is not for them."""
    if not isinstance(inputs, Tensor):
        raise FedhmError(f"{what} is for models that take one tensor, not for those that read texts")
    return inputs


def rows_of(inputs: Inputs, rows: Tensor) -> Inputs:
    """Return some samples of a batch."""
    return {name: tensor[rows] for name, tensor in inputs.items()} if isinstance(inputs, dict) else inputs[rows]


def repeated(inputs: Inputs, times: int) -> Inputs:
    """Return a batch in which a batch comes several times."""
    if isinstance(inputs, dict):
        return {name: torch.cat([tensor] * times) for name, tensor in inputs.items()}
    return torch.cat([inputs] * times)


def shape_of(inputs: Inputs) -> tuple[int, ...]:
    """Return the shape of one sample of a batch; of several tensors, that of the first."""
    return tuple((next(iter(inputs.values())) if isinstance(inputs, dict) else inputs).shape[1:])


def on_device(inputs: Inputs, device: torch.device) -> Inputs:
    return {n: t.to(device) for n, t in inputs.items()} if isinstance(inputs, dict) else inputs.to(device)
