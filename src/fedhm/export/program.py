"""From a network to the program that is written: raw inputs, folded BatchNorm, any number of samples at once."""

from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from fedhm.errors import FedhmError
from fedhm.export.fold import fold_batchnorm
from fedhm.export.subject import RawImages, Subject
from fedhm.lowrank.hadamard import Hadamard, HadamardConv1d, HadamardConvolution, HadamardTransposed
from fedhm.machine.printable import printable
from fedhm.networks.structure import copied


def as_program(subject: Subject, most: int | None = None) -> ExportedProgram:
    """Return the subject's network as a graph of operations; `most` samples at once, or any number of them."""
    network = _composed(copied(subject.network))
    if subject.preprocessing is not None:
        network = RawImages(network, subject.preprocessing)
    network.eval().requires_grad_(False)
    sample = subject.inputs[:1].repeat(2, *(1,) * (subject.inputs.ndim - 1))  # of a single one, torch would fix the 1
    try:
        whole = torch.export.export(network, (sample,), dynamic_shapes=(_batch(most),))
        graph = whole.module(check_guards=False)
        fold_batchnorm(graph)
        return torch.export.export(graph, (sample,), dynamic_shapes=(_batch(most),))
    except Exception as error:  # whatever torch, or a foreign model, raises
        reason = printable(str(error).strip().partition("\n")[0]) or type(error).__name__
        raise FedhmError(
            f"the model of {subject.name} cannot be exported, since torch.export cannot follow its forward, for any "
            f"number of samples and without decisions by their values: {reason}"
        ) from error


def _batch(most: int | None) -> Any:
    return {0: Dim.DYNAMIC if most is None else Dim("batch", min=1, max=most)}


def _composed(network: nn.Module) -> nn.Module:
    """Return the network with the weights that Hadamard factors stand for: these would be multiplied at each call."""
    for parent in list(network.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, Hadamard):
                setattr(parent, name, _dense(layer))
    return _dense(network) if isinstance(network, Hadamard) else network


def _dense(layer: Hadamard) -> nn.Module:
    weight = layer.weight.detach()
    weight = (weight.T if isinstance(layer, HadamardTransposed) else weight).contiguous()
    outputs, inputs, *kernel = weight.shape
    bias = layer.bias is not None
    dense: nn.Linear | nn.Conv1d | nn.Conv2d = nn.Linear(inputs, outputs, bias=bias)
    if isinstance(layer, HadamardConvolution):
        kind: Any = nn.Conv1d if isinstance(layer, HadamardConv1d) else nn.Conv2d
        shape = (tuple(kernel), layer.stride, layer.padding, layer.dilation)
        dense = kind(inputs, outputs, *shape, bias=bias, padding_mode=layer.padding_mode)
    dense.weight, dense.bias = nn.Parameter(weight), layer.bias
    return dense
