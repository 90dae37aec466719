"""The inputs of a network, one tensor or several tensors by name as transformers take them, and its output."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedhm.errors import FedhmError

Inputs = Tensor | dict[str, Tensor]  # a batch; named tensors are passed as keyword arguments


def forward_batch(forward: Callable[..., Any], inputs: Inputs, when: str = "") -> Tensor:
    """Run a network on a batch and return its output tensor: the output itself, or its `logits`."""
    output = forward(**inputs) if isinstance(inputs, dict) else forward(inputs)
    found = output if isinstance(output, Tensor) else getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise FedhmError(f"{when}the model must give a tensor of scores, not a {type(found).__name__}")
    return found


def require_tensor(inputs: Inputs | object, what: str) -> Tensor:
    """Return inputs that are one tensor. For several tensors, raise that `what` does not support them."""
    if not isinstance(inputs, Tensor):
        raise FedhmError(f"{what} is for models that take one tensor, not for those that read texts")
    return inputs


def select_rows(inputs: Inputs, rows: Tensor) -> Inputs:
    """Return some samples of a batch."""
    return {name: tensor[rows] for name, tensor in inputs.items()} if isinstance(inputs, dict) else inputs[rows]


def repeat_batch(inputs: Inputs, times: int) -> Inputs:
    """Return a batch repeated several times."""
    if isinstance(inputs, dict):
        return {name: torch.cat([tensor] * times) for name, tensor in inputs.items()}
    return torch.cat([inputs] * times)


def sample_shape(inputs: Inputs) -> tuple[int, ...]:
    """Return the shape of one sample of a batch. For several tensors it is the shape of the first."""
    return tuple((next(iter(inputs.values())) if isinstance(inputs, dict) else inputs).shape[1:])


def probe_model(model: nn.Module, batch: Inputs, check: Callable[[Tensor], None]) -> str | None:
    """Run one batch through a model, and return the name of the Linear layer whose output is the model's, if any.

    `check` raises if the output does not fit the data. The layer is found by its output, since a model may define its
    layers in any order.
    """
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise FedhmError("the model has lazy layers without shapes: run it once on a batch first")
    _check_memory(model)
    outputs: dict[str, Tensor] = {}
    try:
        copied = copy.deepcopy(model).eval()  # the user's model may count its calls
        for name, layer in copied.named_modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda _, __, output, name=name: outputs.update({name: output}))
        with torch.no_grad():
            output = forward_batch(copied, batch)
    except FedhmError:
        raise
    except Exception as error:  # whatever a foreign model raises
        raise FedhmError(f"the model does not accept the inputs, of shape {sample_shape(batch)}: {error}") from error
    check(output)
    return next((name for name, found in outputs.items() if found is output), None)


def _check_memory(model: nn.Module) -> None:
    """Refuse different parameters in the same memory: copies, factors and other memory formats would separate them."""
    places = [(str(p.device), p.data_ptr(), name, _extent(p)) for name, p in model.named_parameters() if p.data_ptr()]
    for (device, start, name, extent), (next_device, next_start, other, _) in itertools.pairwise(sorted(places)):
        if device == next_device and next_start < start + extent:
            raise FedhmError(
                f"'{name}' and '{other}' are two parameters in the same memory, which training would separate: "
                "tie them by giving both layers one and the same nn.Parameter"
            )


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from the first to the last number of a tensor."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
