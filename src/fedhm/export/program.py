"""From a network to the program that is written: raw inputs, folded BatchNorm, any number of samples at once."""

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from fedhm.errors import FedhmError
from fedhm.export.subject import RawImages, Subject
from fedhm.lowrank.hadamard import Hadamard, HadamardConv1d, HadamardConvolution, HadamardTransposed
from fedhm.machine.printable import printable
from fedhm.networks.structure import copy_network


def as_program(subject: Subject, most: int | None = None) -> ExportedProgram:
    """Return the subject's network as a graph of operations; `most` samples at once, or any number of them."""
    network = _composed(copy_network(subject.network))
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


# BatchNorm folded into the layer before it, where that is exact: y = γ (W x + b − μ) / σ + β is one layer.
#
# It is looked for in the graph of operations, so it does not matter how a model calls its layers, and a factorized
# convolution is two convolutions, of which the second one takes the normalisation.

aten = torch.ops.aten
CONVOLUTIONS = {getattr(aten, f"conv{n}d").default for n in (1, 2, 3)} | {
    getattr(aten, f"conv{n}d").padding for n in (1, 2, 3)
}
EPSILON = 7  # the arguments of batch_norm: input, weight, bias, mean, variance, training, momentum, eps, …
TRAINING = 5


def fold_batchnorm(graph: GraphModule) -> int:
    """Fold what can be folded, in place, and return how many layers that were."""
    folded = 0
    for normalisation in list(graph.graph.nodes):
        if normalisation.target is aten.batch_norm.default and _is_foldable(normalisation):
            _fold(graph, normalisation, folded)
            folded += 1
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return folded


def _is_foldable(normalisation: Node) -> bool:
    layer, *tensors = normalisation.args[:5]
    if normalisation.args[TRAINING] or not isinstance(layer, Node) or len(layer.users) != 1:
        return False  # its output is also used as it is
    if tensors[2] is None or any(tensor is not None and not _is_constant(tensor) for tensor in tensors):
        return False
    if layer.target not in CONVOLUTIONS and not (layer.target is aten.linear.default and _is_matrix(layer)):
        return False
    return all(argument is None or _is_constant(argument) for argument in layer.args[1:3])


def _is_constant(argument: Any) -> bool:
    return isinstance(argument, Node) and argument.op == "get_attr"


def _is_matrix(layer: Node) -> bool:
    """Tell whether a Linear layer's outputs are (N, C): of more axes, the second one is normalised, not the last."""
    return len(layer.meta["val"].shape) == 2


def _fold(graph: GraphModule, normalisation: Node, number: int) -> None:
    layer, gamma, beta, mean, variance = normalisation.args[:5]
    assert isinstance(layer, Node)
    weight, bias = (_value(graph, argument) for argument in (layer.args[1], (*layer.args, None)[2]))
    numbers = [_value(graph, argument) for argument in (mean, variance)]
    fuse: Any = fuse_linear_bn_weights if layer.target is aten.linear.default else fuse_conv_bn_weights
    together = fuse(weight, bias, *numbers, normalisation.args[EPSILON], _value(graph, gamma), _value(graph, beta))
    with graph.graph.inserting_before(layer):
        nodes: list[Node] = []
        for kind, tensor in zip(("weight", "bias"), together, strict=True):
            name = f"folded_{number}_{kind}"
            graph.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=False))
            nodes.append(graph.graph.get_attr(name))
    layer.args = (layer.args[0], *nodes, *layer.args[3:])
    normalisation.replace_all_uses_with(layer)
    graph.graph.erase_node(normalisation)


def _value(graph: GraphModule, argument: Any) -> Tensor | None:
    return None if argument is None else operator.attrgetter(argument.target)(graph)
