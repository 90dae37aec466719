"""BatchNorm folded into the layer before it, where that is exact: y = γ (W x + b − μ) / σ + β is one layer.

It is looked for in the graph of operations, so it does not matter how a model calls its layers, and a factorized
convolution is two convolutions, of which the second one takes the normalisation.
"""

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

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
