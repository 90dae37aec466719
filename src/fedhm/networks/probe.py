"""One batch through a model before anything else: does it fit the data, and which layer gives its output?"""

import copy
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedhm.errors import FedhmError
from fedhm.networks.inputs import Inputs, scores, shape_of


def probe(model: nn.Module, batch: Inputs, check: Callable[[Tensor], None]) -> str | None:
    """Return the name of the Linear layer whose output is the model's, if there is one; `check` looks at the output.

    The layer is found by what it does, since a model may define its layers in any order.
    """
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise FedhmError("the model has lazy layers without shapes: run it once on a batch first")
    _check_memory(model)
    outputs: dict[str, Tensor] = {}
    try:
        copied = copy.deepcopy(model).eval()  # a model of the user's may count its calls
        for name, layer in copied.named_modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda _, __, output, name=name: outputs.update({name: output}))
        with torch.no_grad():
            output = scores(copied, batch)
    except FedhmError:
        raise
    except Exception as error:  # whatever a foreign model raises
        raise FedhmError(f"the model does not accept the inputs, of shape {shape_of(batch)}: {error}") from error
    check(output)
    return next((name for name, found in outputs.items() if found is output), None)


def _check_memory(model: nn.Module) -> None:
    """Refuse parameters that lie in the same memory: copies, factors and other memory formats would part them."""
    lying = [(str(p.device), p.data_ptr(), name, _extent(p)) for name, p in model.named_parameters() if p.data_ptr()]
    for (device, start, name, extent), (next_device, next_start, other, _) in itertools.pairwise(sorted(lying)):
        if device == next_device and next_start < start + extent:
            raise FedhmError(
                f"'{name}' and '{other}' are two parameters in the same memory, which training would part: "
                "tie them by giving both layers one and the same nn.Parameter"
            )


def _extent(tensor: Tensor) -> int:
    """Return the bytes from the first to the last number of a tensor."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
