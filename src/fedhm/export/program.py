"""From a network to the program that is written: it takes raw inputs and any number of samples, BatchNorm is folded."""

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from fedhm.errors import FedhmError
from fedhm.export.source import ExportSource, RawImages
from fedhm.lowrank.hadamard import Hadamard, HadamardConv1d, HadamardConvolution, HadamardTransposed
from fedhm.machine.printable import printable
from fedhm.networks.structure import copy_network


def as_program(source: ExportSource, max_batch: int | None = None) -> ExportedProgram:
    """Return the network as a graph of operations, for any number of samples or for at most `max_batch` at once."""
    network = _without_hadamard(copy_network(source.network))
    if source.preprocessing is not None:
        network = RawImages(network, source.preprocessing)
    network.eval().requires_grad_(False)
    sample = source.inputs[:1].repeat(
        2, *(1,) * (source.inputs.ndim - 1)
    )  # with one sample, torch would fix the batch size to 1
    try:
        whole = torch.export.export(network, (sample,), dynamic_shapes=(_batch(max_batch),))
        graph = whole.module(check_guards=False)
        fold_batchnorm(graph)
        return torch.export.export(graph, (sample,), dynamic_shapes=(_batch(max_batch),))
    except Exception as error:  # whatever torch, or a foreign model, raises
        reason = printable(str(error).strip().partition("\n")[0]) or type(error).__name__
        raise FedhmError(
            f"the model of {source.name} cannot be exported, since torch.export cannot follow its forward. It "
            f"must take any number of samples and not branch on their values: {reason}"
        ) from error


def _batch(max_batch: int | None) -> Any:
    return {0: Dim.DYNAMIC if max_batch is None else Dim("batch", min=1, max=max_batch)}


def _without_hadamard(network: nn.Module) -> nn.Module:
    """Replace Hadamard factors by the weights that they compose. Otherwise each call would multiply them again."""
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


# BatchNorm is folded into the layer before it: y = γ (W x + b − μ) / σ + β is one layer, and exactly the same.
#
# The search runs on the graph of operations, so it does not matter how a model calls its layers. A factorized
# convolution is two convolutions, and the normalisation goes into the second.

aten = torch.ops.aten
CONVOLUTIONS = {getattr(aten, f"conv{n}d").default for n in (1, 2, 3)} | {
    getattr(aten, f"conv{n}d").padding for n in (1, 2, 3)
}
EPSILON = 7  # the arguments of batch_norm: input, weight, bias, mean, variance, training, momentum, eps, …
TRAINING = 5


def fold_batchnorm(graph: GraphModule) -> int:
    """Fold every BatchNorm that can be folded, in place, and return their number."""
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
        return False  # another operation uses the layer's output without normalisation
    if tensors[2] is None or any(tensor is not None and not _is_constant(tensor) for tensor in tensors):
        return False
    if layer.target not in CONVOLUTIONS and not (layer.target is aten.linear.default and _is_matrix(layer)):
        return False
    return all(argument is None or _is_constant(argument) for argument in layer.args[1:3])


def _is_constant(argument: Any) -> bool:
    return isinstance(argument, Node) and argument.op == "get_attr"


def _is_matrix(layer: Node) -> bool:
    """Tell whether outputs are (N, C). With more axes, BatchNorm normalises the second, a Linear layer the last."""
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
