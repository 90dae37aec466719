"""One batch through a model before anything else: does it fit the data, and which layer gives the scores?"""

import copy

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedhm.errors import FedhmError


def probe(model: nn.Module, batch: Tensor, classes: int) -> str | None:
    """Checks that `model` gives a score for each class; the name of the Linear layer whose output they are, if any.

    The layer is found by what it does, since a model may define its layers in any order.
    """
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise FedhmError("the model has lazy layers without shapes: run it once on a batch first")
    outputs: dict[str, Tensor] = {}
    try:
        copied = copy.deepcopy(model).eval()  # a model of the user's may count its calls
        for name, layer in copied.named_modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda _, __, output, name=name: outputs.update({name: output}))
        with torch.no_grad():
            scores = copied(batch)
    except Exception as error:  # whatever a foreign model raises
        raise FedhmError(f"the model does not accept the test set's inputs: {error}") from error
    if not isinstance(scores, Tensor):
        raise FedhmError(f"the model must give a tensor of scores, not a {type(scores).__name__}")
    if scores.ndim != 2 or scores.shape[1] < classes:
        shape = tuple(scores.shape)
        raise FedhmError(f"the model must give a score for each of {classes} classes, but its output is {shape}")
    return next((name for name, output in outputs.items() if output is scores), None)
