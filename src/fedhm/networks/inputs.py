"""The inputs of a network, one tensor or several by position or by name, and its output."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedhm.errors import FedhmError

# a batch: one tensor, several that a model takes by position, or several that it takes by name
Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def forward_batch(forward: Callable[..., Any], inputs: Inputs, when: str = "") -> Tensor:
    """Run a network on a batch and return its output tensor: the output itself, or its `logits`."""
    if isinstance(inputs, dict):
        output = forward(**inputs)
    else:
        output = forward(*inputs) if isinstance(inputs, tuple) else forward(inputs)
    found = output if isinstance(output, Tensor) else getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise FedhmError(
            f"{when}the model must give a tensor of scores, not a {type(found).__name__}: hand in a module whose "
            "forward returns the tensor that is learned (for the loss of several exits, stack them)"
        )
    return found


def require_tensor(inputs: Inputs | object, what: str) -> Tensor:
    """Return inputs that are one tensor. For several tensors, raise that `what` does not support them."""
    if not isinstance(inputs, Tensor):
        raise FedhmError(f"{what} is for models that take one tensor, not for those that read texts or several tensors")
    return inputs


def map_tensors(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return inputs with every tensor changed."""
    if isinstance(inputs, dict):
        return {name: change(tensor) for name, tensor in inputs.items()}
    return tuple(map(change, inputs)) if isinstance(inputs, tuple) else change(inputs)


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Return all tensors of a batch."""
    if isinstance(inputs, dict):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple) else [inputs]


def select_rows(inputs: Inputs, rows: Tensor) -> Inputs:
    """Return some samples of a batch."""
    return map_tensors(lambda tensor: tensor[rows], inputs)


def repeat_batch(inputs: Inputs, times: int) -> Inputs:
    """Return a batch repeated several times."""
    return map_tensors(lambda tensor: torch.cat([tensor] * times), inputs)


def sample_shape(inputs: Inputs) -> tuple[int, ...]:
    """Return the shape of one sample of a batch. For several tensors it is the shape of the first."""
    return tuple(tensors_of(inputs)[0].shape[1:])


def probe_model(model: nn.Module, batch: Inputs, check: Callable[[Tensor], None]) -> tuple[str, ...]:
    """Run one batch through a model, and return the names of the Linear layers that give its output: the classifiers.

    That is the layer whose output is the model's. A model with several exits may stack, add or average the outputs of
    several layers: then it is all of these. None may be found. `check` raises if the output does not fit the data. The
    layers are found by their outputs, since a model may define its layers in any order.
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
    single = next((name for name, found in outputs.items() if found is output), None)
    return _exits(copied, batch, outputs) if single is None else (single,)


# operations of autograd that gather the outputs of several exits, without weights of their own
GATHERING = ("Stack", "Cat", "Mean", "Sum", "Add", "Div", "Unsqueeze", "Select", "View", "Transpose", "Permute")


def _exits(model: nn.Module, batch: Inputs, layers: dict[str, Tensor]) -> tuple[str, ...]:
    """Return the layers whose outputs are stacked, added or averaged to the model's output, if they are several.

    layers  filled by hooks when the model runs: the outputs of all Linear layers
    """
    try:
        with torch.enable_grad():  # for the graph from the output back to the layers
            output = forward_batch(model, batch)
    except RuntimeError:  # the model has a pass without gradients only
        return ()
    by_node = {found.grad_fn: name for name, found in layers.items() if found.grad_fn is not None}
    found: set[str] = set()
    waiting: list[Any] = [output.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in by_node:
            found.add(by_node[node])
        elif node.name().startswith(GATHERING):
            waiting += [before for before, _ in node.next_functions]
        else:
            return ()  # the output is computed from something else too
    rows = {layers[name].shape[-1] for name in found}
    return tuple(name for name in layers if name in found) if len(found) > 1 and len(rows) == 1 else ()


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
