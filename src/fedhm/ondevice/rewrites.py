"""Operators that ExecuTorch lacks or computes wrongly in training, written by operators that it computes right.

    max-pooling       its gradients are wrong in the runtime, silently: here it is a chain of comparisons
    average pooling   its backward operator is missing: here it is a sum of shifted copies
    conv1d            its backward operator is for images: here signals are images of one row
    padding           its backward operator cannot cut: here it is a concatenation
    attention         its backward operator is missing: here it is two products and a softmax
    BatchNorm         its training form is missing: here it is elementary operations, and the statistics are outputs

Each rewrite is exact: the same numbers up to the order of sums, and the same gradient where values are equal. Operators
that cannot be rewritten exactly are refused, by the name of their layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from fedhm.errors import FedhmError

aten = torch.ops.aten
RANDOM = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
DRAWN = {"bernoulli", "rand", "randn", "rand_like", "randn_like", "randint", "normal", "multinomial", "rrelu"}


@dataclass(frozen=True)
class Statistic:
    """The running averages of one BatchNorm layer: a step moves both by a share of the batch's mean and variance."""

    mean: str  # the name of the tensor
    variance: str
    momentum: float  # the share
    values: int  # how many values each sample gives a channel


def rewrite(graph: GraphModule, sample_weights: str, prefix: str) -> list[Statistic]:
    """Rewrite a training step's graph in place. Return the BatchNorm statistics, in the order of the added outputs.

    sample_weights  the name of the input with a weight for each row: rows of weight 0 do not count for statistics
    prefix          of the names of the network's tensors
    """
    (weights,) = (node for node in graph.graph.nodes if node.op == "placeholder" and node.target == sample_weights)
    statistics: list[Statistic] = []
    outputs: list[Node] = []
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        _check_random(node)
        if node.target is aten.batch_norm.default:
            found = _rewrite_batch_norm(graph, node, weights, prefix)
            if found is not None:
                statistics.append(found[0])
                outputs += found[1]
        elif node.target in REWRITES:
            with graph.graph.inserting_before(node):
                new = REWRITES[node.target](graph, node)
            new.meta = dict(node.meta)  # shapes, which the next pooling layer reads
            node.replace_all_uses_with(new)
            graph.graph.erase_node(node)
        else:
            _check_mutation(graph, node)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    output.args = ((*output.args[0], *outputs),)
    graph.graph.set_codegen(CodeGen())  # torch.export's own would insist on the former number of outputs
    graph.graph.lint()
    graph.recompile()
    return statistics


def layer_name(node: Node) -> str:
    """Return the layer that a node belongs to, for a sentence."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name = str(stack[-1][0]).partition("network")[2].removeprefix(".") if stack else ""
    return f"layer '{name}'" if name else "the model's forward"


def operator_name(node: Node) -> str:
    return str(getattr(node.target, "_opname", "") or getattr(node.target, "__name__", node.target)).partition(".")[0]


def _refuse(node: Node, why: str) -> FedhmError:
    return FedhmError(f"{layer_name(node)} cannot be trained by ExecuTorch: {why}")


# ---- BatchNorm ----


def batch_norm(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, weights: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise x (N, C, …) by the rows that count; return it with their mean and unbiased variance, for averages."""
    axes = [0, *range(2, x.ndim)]
    row = weights.view(-1, *(1,) * (x.ndim - 1))
    channel = (1, -1, *(1,) * (x.ndim - 2))
    count = weights.sum() * float(math.prod(x.shape[2:]))
    mean = (x * row).sum(axes) / count
    centred = x - mean.view(channel)
    variance = (centred * centred * row).sum(axes) / count
    y = centred * torch.rsqrt(variance + eps).view(channel)
    y = y if gamma is None else y * gamma.view(channel)
    y = y if beta is None else y + beta.view(channel)
    return y, mean.detach(), (variance * (count / (count - 1.0))).detach()


def _rewrite_batch_norm(
    graph: GraphModule, node: Node, weights: Node, prefix: str
) -> tuple[Statistic, list[Node]] | None:
    x, gamma, beta, mean, variance, training, momentum, eps = node.args[:8]
    if not training:
        raise _refuse(node, "it normalises by stored statistics, which a task brings anew: unfreeze it")
    with graph.graph.inserting_before(node):
        new = graph.graph.call_function(batch_norm, (x, gamma, beta, weights, eps))
        parts = [graph.graph.call_function(_part, (new, number)) for number in range(3)]
    parts[0].meta = dict(node.meta)
    node.replace_all_uses_with(parts[0])
    graph.graph.erase_node(node)
    if not (isinstance(mean, Node) and isinstance(variance, Node) and mean.op == variance.op == "get_attr"):
        return None  # of a smaller network inside, whose statistics do not count
    if not isinstance(momentum, float):
        raise _refuse(node, "its running averages are means over all batches (momentum=None): give it a momentum")
    names = [str(each.target).removeprefix(prefix) for each in (mean, variance)]
    assert isinstance(x, Node)
    values = math.prod(int(size) for size in x.meta["val"].shape[2:])
    return Statistic(names[0], names[1], momentum, values), parts[1:]


def _part(found: Sequence[Tensor], number: int) -> Tensor:
    return found[number]


# ---- pooling, padding, attention ----

Size = tuple[int, int]
Rewrite = Callable[[GraphModule, Node], Node]


class Windows(NamedTuple):
    """The windows of a pooling layer: how the input is padded, and where each window begins.

    A named tuple, because the code of a graph can hold it.
    """

    kernel: Size
    stride: Size
    padding: Size
    dilation: Size
    inputs: Size
    outputs: Size

    @property
    def beyond(self) -> Size:
        """Return the rows and columns that the last windows reach beyond the padded input; negative: short of it."""
        needed = [
            (o - 1) * s + d * (k - 1) + 1
            for o, s, d, k in zip(self.outputs, self.stride, self.dilation, self.kernel, strict=True)
        ]
        rows, columns = (n - i - 2 * p for n, i, p in zip(needed, self.inputs, self.padding, strict=True))
        return rows, columns

    def shifted(self, x: Tensor, fill: float, beyond: float) -> list[Tensor]:
        """Return a tensor for each place of a window, row by row, with the outputs' shape."""
        top, left = self.padding
        rows, columns = self.beyond
        x = pad_constant(x, [left, left, top, top], fill)
        x = pad_constant(x, [0, max(0, columns), 0, max(0, rows)], beyond)
        found: list[Tensor] = []
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                first = (i * self.dilation[0], j * self.dilation[1])
                ends = [f + (o - 1) * s + 1 for f, o, s in zip(first, self.outputs, self.stride, strict=True)]
                found.append(x[:, :, first[0] : ends[0] : self.stride[0], first[1] : ends[1] : self.stride[1]])
        return found


def pad_constant(x: Tensor, pads: Sequence[int], value: float = 0.0) -> Tensor:
    """Pad as `F.pad` does, last axis first. The backward of `F.pad` would cut, which the runtime's operator cannot."""
    for number, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        axis = x.ndim - 1 - number
        shape = list(x.shape)
        parts = [x]
        for count, place in ((before, 0), (after, 2)):
            if count > 0:
                shape[axis] = count
                parts.insert(place, torch.full(shape, value, dtype=x.dtype))
        x = torch.cat(parts, axis) if len(parts) > 1 else x
        if min(before, after) < 0:
            x = x.narrow(axis, max(0, -before), x.shape[axis] - max(0, -before) - max(0, -after))
    return x


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return softmax(q kᵀ · scale + mask) v, as `F.scaled_dot_product_attention` defines it."""
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, torch.full_like(scores, torch.finfo(scores.dtype).min))
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ v


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: tuple[int, int],
    dilation: int,
    groups: int,
) -> Tensor:
    """Convolve signals (N, C, L) as images of one row: the runtime's backward operator is for images only."""
    x, weight = pad_constant(x, padding)[:, :, None], weight[:, :, None]
    return F.conv2d(x, weight, bias, (1, stride), (0, 0), (1, dilation), groups)[:, :, 0]


def max_pool(x: Tensor, windows: Windows) -> Tensor:
    """Return the largest value of each window. Of equal values the first gets the gradient, as in PyTorch."""
    if x.ndim == 3:
        return max_pool(x[:, :, None], windows)[:, :, 0]
    lowest = torch.finfo(x.dtype).min
    best, *others = windows.shifted(x, lowest, lowest)
    for other in others:
        best = torch.where(other > best, other, best)
    return best


def avg_pool(x: Tensor, windows: Windows, counts: Sequence[Sequence[float]] | float) -> Tensor:
    """Return the sum of each window divided by its count: one for all, or one for each place of the output."""
    if x.ndim == 3:
        return avg_pool(x[:, :, None], windows, counts)[:, :, 0]
    first, *others = windows.shifted(x, 0.0, 0.0)
    total = first
    for other in others:
        total = total + other
    if isinstance(counts, float):
        return total * (1.0 / counts)
    return total / torch.tensor(counts, dtype=x.dtype)


def _arguments(node: Node, names: Sequence[str]) -> dict[str, Any]:
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _source(node: Node, axes: int) -> Node:
    """Return the node that is pooled, a batch of images or signals."""
    x = node.args[0]
    assert isinstance(x, Node)
    if len(x.meta["val"].shape) != axes + 2:
        raise _refuse(node, f"{operator_name(node)} must get a batch, with an axis for samples and one for channels")
    return x


def _sizes(node: Node, axes: int) -> Size:
    shape = [int(each) for each in node.meta["val"].shape[-axes:]]
    return (1, shape[0]) if axes == 1 else (shape[0], shape[1])


def _pair(value: Any, default: Size, axes: int, missing: int) -> Size:
    """Return a size by axis; signals are images of one row, and `missing` is the row's."""
    values = [int(each) for each in value] if isinstance(value, list | tuple) else [int(value)] if value else []
    if not values:
        return default
    return (missing if axes == 1 else values[0], values[-1])


def _windows(node: Node, x: Node, axes: int, given: dict[str, Any]) -> Windows:
    kernel = _pair(given["kernel"], (1, 1), axes, 1)
    return Windows(
        kernel,
        _pair(given.get("stride"), kernel, axes, 1),
        _pair(given.get("padding"), (0, 0), axes, 0),
        _pair(given.get("dilation"), (1, 1), axes, 1),
        _sizes(x, axes),
        _sizes(node, axes),
    )


def _rewrite_max_pool(axes: int) -> Rewrite:
    def rewritten(graph: GraphModule, node: Node) -> Node:
        given = _arguments(node, ("x", "kernel", "stride", "padding", "dilation", "ceil_mode"))
        x = _source(node, axes)
        return graph.graph.call_function(max_pool, (x, _windows(node, x, axes, given)))

    return rewritten


def _rewrite_avg_pool(axes: int) -> Rewrite:
    def rewritten(graph: GraphModule, node: Node) -> Node:
        names = ("x", "kernel", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
        given = _arguments(node, names)
        x = _source(node, axes)
        windows = _windows(node, x, axes, given)
        if given.get("divisor_override"):
            return graph.graph.call_function(avg_pool, (x, windows, float(given["divisor_override"])))
        counted = float(given.get("count_include_pad", True))
        counts = torch.stack(windows.shifted(torch.ones(1, 1, *windows.inputs), counted, 0.0)).sum(0)[0, 0]
        same = bool((counts == counts[0, 0]).all())
        return graph.graph.call_function(avg_pool, (x, windows, float(counts[0, 0]) if same else counts.tolist()))

    return rewritten


def _rewrite_adaptive_mean(axes: int) -> Rewrite:
    def rewritten(graph: GraphModule, node: Node) -> Node:
        x = _source(node, axes)
        inputs, outputs = _sizes(x, axes), _sizes(node, axes)
        if any(i % o for i, o in zip(inputs, outputs, strict=True)):
            raise _refuse(node, f"it pools {inputs} to {outputs} by windows of unequal size")
        if outputs == (1, 1):
            return graph.graph.call_function(aten.mean.dim, (x, list(range(2, 2 + axes)), True))
        size = (inputs[0] // outputs[0], inputs[1] // outputs[1])
        windows = Windows(size, size, (0, 0), (1, 1), inputs, outputs)
        return graph.graph.call_function(avg_pool, (x, windows, float(math.prod(size))))

    return rewritten


def _rewrite_pad(graph: GraphModule, node: Node) -> Node:
    given = _arguments(node, ("x", "pads", "mode", "value"))
    if given.get("mode", "constant") != "constant":
        raise _refuse(node, f"its padding by '{given['mode']}' has no exact form here: pad by zeros")
    return graph.graph.call_function(pad_constant, (node.args[0], given["pads"], float(given.get("value") or 0.0)))


def _rewrite_conv1d(graph: GraphModule, node: Node) -> Node:
    given = _arguments(node, ("x", "weight", "bias", "stride", "padding", "dilation", "groups"))
    weight = given["weight"]
    stride, dilation = (_pair(given.get(name), (1, 1), 1, 1)[1] for name in ("stride", "dilation"))
    padding = given.get("padding", 0)
    if isinstance(padding, str):  # "same" or "valid"
        total = dilation * (int(weight.meta["val"].shape[-1]) - 1) if padding == "same" else 0
        pads = (total // 2, total - total // 2)
    else:
        pads = (_pair(padding, (0, 0), 1, 0)[1],) * 2
    settings = (stride, pads, dilation, int(given.get("groups", 1)))
    return graph.graph.call_function(conv1d, (given["x"], weight, given.get("bias"), *settings))


def _rewrite_constant_pad(graph: GraphModule, node: Node) -> Node:
    given = _arguments(node, ("x", "pads", "value"))
    return graph.graph.call_function(pad_constant, (node.args[0], given["pads"], float(given.get("value") or 0.0)))


def _rewrite_attention(graph: GraphModule, node: Node) -> Node:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = _arguments(node, names)
    if given.get("dropout_p"):
        raise _refuse(node, "dropout in attention draws random numbers, which a graph cannot: set it to 0")
    if given.get("enable_gqa"):
        raise _refuse(node, "grouped queries have no exact form here")
    settings = (given.get("attn_mask"), bool(given.get("is_causal")), given.get("scale"))
    return graph.graph.call_function(attention, (given["query"], given["key"], given["value"], *settings))


def _refused(why: str) -> Rewrite:
    def refuse(_: GraphModule, node: Node) -> Node:
        raise _refuse(node, f"{operator_name(node)} {why}")

    return refuse


NO_BACKWARD = "has no backward operator in its runtime"
WITH_INDICES = "also gives the places of the largest values: pool without them"
REWRITES: dict[Any, Rewrite] = {
    aten.max_pool1d.default: _rewrite_max_pool(1),
    aten.max_pool2d.default: _rewrite_max_pool(2),
    aten.avg_pool1d.default: _rewrite_avg_pool(1),
    aten.avg_pool2d.default: _rewrite_avg_pool(2),
    aten.adaptive_avg_pool1d.default: _rewrite_adaptive_mean(1),
    aten.adaptive_avg_pool2d.default: _rewrite_adaptive_mean(2),
    aten.conv1d.default: _rewrite_conv1d,
    aten.conv1d.padding: _rewrite_conv1d,
    aten.pad.default: _rewrite_pad,
    aten.constant_pad_nd.default: _rewrite_constant_pad,
    aten.scaled_dot_product_attention.default: _rewrite_attention,
    aten.conv_transpose1d.default: _refused(NO_BACKWARD),
    aten.conv_transpose2d.input: _refused(NO_BACKWARD),
    aten.conv_transpose3d.input: _refused(NO_BACKWARD),
    aten.conv3d.default: _refused(NO_BACKWARD),
    aten.conv3d.padding: _refused(NO_BACKWARD),
    aten.max_pool1d_with_indices.default: _refused(WITH_INDICES),
    aten.max_pool2d_with_indices.default: _refused(WITH_INDICES),
    aten.adaptive_max_pool1d.default: _refused(WITH_INDICES),
    aten.adaptive_max_pool2d.default: _refused(WITH_INDICES),
    aten.max_pool3d.default: _refused("has no exact form here"),
    aten.avg_pool3d.default: _refused("has no exact form here"),
}


# ---- what is refused ----


def _check_random(node: Node) -> None:
    """Refuse operators that draw random numbers: the graph would draw none, or the same ones in every step."""
    name = operator_name(node)
    if name in RANDOM and len(node.args) > 2 and node.args[1] and node.args[2]:
        raise _refuse(node, f"{name} draws random numbers, which a graph cannot: set its probability to 0")
    if name.rstrip("_") in DRAWN:
        raise _refuse(node, f"{name} draws random numbers, which a graph cannot")


def _check_mutation(graph: GraphModule, node: Node) -> None:
    """Drop the counters of BatchNorm layers, which do not travel; refuse other changes of buffers."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    changed = node.args[0]
    if not (isinstance(changed, Node) and changed.op == "get_attr"):
        return
    if str(changed.target).endswith("num_batches_tracked"):
        node.replace_all_uses_with(changed)
        graph.graph.erase_node(node)
        return
    raise _refuse(node, f"its forward changes '{str(changed.target).partition('.')[2]}' itself")
