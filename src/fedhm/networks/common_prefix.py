"""Two networks on one batch that begin alike: what both compute runs once, forwards and backwards.

A client's network and the smaller one inside it have the same weights up to the first layer that is smaller inside. In
the pass of the first network, every pure operation before that layer is recorded: its arguments and its result. In the
pass of the second, an operation with the same arguments gets the recorded result. This knows nothing of modules, so it
is exact for any network: an operation that draws random numbers, has another argument or is not known simply runs.

Gradients are back-propagated in two steps. The first network's go down to the last recorded tensors, and the second's
through the whole graph, where they meet the first's. So only one network's activations are in memory besides the
common ones, as if the networks ran one after the other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

# Operations whose result depends on their arguments alone. These results are kept: computing them again is slow.
HEAVY: frozenset[Callable[..., Any]] = frozenset(
    [torch.conv1d, torch.conv2d, torch.conv3d, F.linear, torch.matmul, Tensor.matmul, torch.bmm, torch.addmm]
)
# These are shared while they are in memory anyway, and computed again otherwise. Some are done in place.
LIGHT: frozenset[Callable[..., Any]] = frozenset(
    [
        *(F.batch_norm, F.layer_norm, F.group_norm, F.embedding, F.pad, torch.flatten, torch.relu, torch.relu_),
        *(F.relu, F.relu6, F.gelu, F.silu, F.leaky_relu, F.elu, F.hardswish, torch.tanh, torch.sigmoid),
        *(F.max_pool1d, F.max_pool2d, F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d),
        *(Tensor.add, Tensor.add_, Tensor.sub, Tensor.mul, Tensor.mul_, torch.add, torch.sub, torch.mul, torch.cat),
        *(Tensor.relu, Tensor.relu_, Tensor.tanh, Tensor.sigmoid, Tensor.mean, torch.mean, Tensor.contiguous),
        *(Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.permute, Tensor.transpose, Tensor.unsqueeze),
        *(Tensor.clone, Tensor.to, Tensor.float),
    ]
)
PLAIN = (int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)  # bool is an int


class CommonPrefix:
    """What two networks have in common in one batch. Call `first`, then `cut`, then, unless that is None, `second`."""

    def __init__(self, device: torch.device) -> None:
        self._operations = _Operations(device.type)

    def first(self, forward: Callable[..., Any], layers: Sequence[nn.Module]) -> Callable[..., Any]:
        """Return the first network's forward pass, which is recorded until one of these layers runs."""
        return self._until(layers, forward)

    def second(self, forward: Callable[..., Any], layers: Sequence[nn.Module]) -> Callable[..., Any]:
        """Return the second network's forward pass, which takes recorded results until one of these layers runs."""

        def replay(*inputs: Any, **named: Any) -> Any:
            self._operations.replaying = True
            try:
                return self._until(layers, forward)(*inputs, **named)
            finally:
                self._operations.forget()

        return replay

    def cut(self, loss: Tensor) -> "Cut | None":
        """Return where the gradient of the first network's loss waits for that of the second.

        None: the networks share no slow operation, or a weight is used both before and behind the cut. Then the second
        network has to run by itself.
        """
        found = self._operations.shared() and _find_cut(loss, self._operations.results())
        if not found:
            self._operations.forget()
        return found or None

    def _until(self, layers: Sequence[nn.Module], forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any, **named: Any) -> Any:
            with _calling(layers, self._operations.stop), self._operations:
                return forward(*inputs, **named)

        return run


@contextmanager
def _calling(layers: Iterable[nn.Module], action: Callable[[], None]) -> Iterator[None]:
    """Do something before one of the layers runs."""
    hooks = [layer.register_forward_pre_hook(lambda *_: action()) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Cut:
    """The tensors at which the gradient of the first loss waits, and the weights that it reaches before them."""

    tensors: Sequence[Tensor]
    weights: Sequence[Tensor]
    waiting: Sequence[Tensor | None] = ()  # gradients of `tensors`

    def backward(self, loss: Tensor) -> None:
        """Back-propagate the first network's loss down to the cut. All that lies before it stays ready for `join`."""
        # not `loss.backward(inputs=...)`, which goes one operation beyond its inputs
        found = list(torch.autograd.grad(loss, [*self.tensors, *self.weights], allow_unused=True))
        for weight in reversed(self.weights):
            gradient = found.pop()  # one at a time, since some are copied
            if gradient is not None:
                _accumulate(weight, gradient)
        self.waiting = found

    def join(self, loss: Tensor) -> Tensor:
        """Return the second network's loss. Its gradient takes the waiting one along."""
        waiting, self.waiting = self.waiting, ()
        joined: Tensor = _Join.apply(waiting, loss, *self.tensors)  # type: ignore[no-untyped-call]
        return joined


def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add to a weight's gradient as `Tensor.backward` does: a first gradient gets the weight's layout."""
    if weight.grad is not None:
        weight.grad += gradient
    elif gradient.layout is not torch.strided or gradient.stride() == weight.stride():
        weight.grad = gradient
    else:
        weight.grad = torch.empty_like(weight).copy_(gradient)


class _Join(torch.autograd.Function):
    """The identity of a loss. Its gradient brings given gradients of other tensors with it."""

    @staticmethod
    def forward(ctx: Any, waiting: Sequence[Tensor | None], loss: Tensor, *_: Tensor) -> Tensor:
        ctx.waiting = waiting
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        waiting, ctx.waiting = ctx.waiting, None
        return None, gradient, *waiting


def _find_cut(loss: Tensor, results: Iterable[Tensor]) -> Cut | None:
    """Find the recorded results from which a loss was computed, and the weights on the way to them."""
    recorded = {(result.grad_fn, result.output_nr): result for result in results if result.grad_fn is not None}
    behind, ends, weights = _walk([loss.grad_fn], recorded)
    before, _, earlier = _walk([node for node, _ in recorded], {})
    # An operation on both sides would be back-propagated twice, but only the first time has what it needs.
    if behind & before or {id(weight) for weight in weights} & {id(weight) for weight in earlier}:
        return None
    nodes = [node for node, _ in ends]
    nearer, _, _ = _walk([step for node in nodes for step, _ in node.next_functions if step is not None], {})
    if nearer & set(nodes):
        return None
    return Cut([recorded[end] for end in ends], weights) if ends or weights else None


def _walk(start: Iterable[Any], stops: Mapping[tuple[Any, int], Tensor]) -> tuple[set[Any], list[Any], list[Tensor]]:
    """Follow a graph of gradients. Return the operations before the stops, the stops, and the weights found."""
    waiting = [node for node in start if node is not None]
    seen, ends, weights = set(waiting), dict[Any, None](), dict[Any, Tensor]()
    while waiting:
        node = waiting.pop()
        if type(node).__name__ == "AccumulateGrad":
            weights[node] = node.variable
        for edge in node.next_functions:
            if edge in stops:
                ends[edge] = None
            elif edge[0] is not None and edge[0] not in seen:
                seen.add(edge[0])
                waiting.append(edge[0])
    return seen - weights.keys(), list(ends), list(weights.values())


@dataclass(frozen=True)
class _Known:
    """A tensor, and the number of its value. Tensors with the same number have the same values."""

    tensor: TensorWeakRef
    number: int
    version: int


class _Result:
    """The result of a recorded operation, and the number of its value."""

    def __init__(self, result: Tensor, number: int, kept: bool, in_place: bool) -> None:
        self.number, self.kept, self.in_place = number, kept, in_place
        self._tensor, self._reference = (result if kept else None), TensorWeakRef(result)
        self._version = result._version

    @property
    def tensor(self) -> Tensor | None:
        """Return the result, or None if it is not in memory any more, or was changed since."""
        found = self._tensor if self.kept else self._reference()
        return found if found is not None and found._version == self._version else None


class _UnknownArgument(Exception):  # noqa: N818
    """Raised for an argument that cannot be compared."""


class _Operations(TorchFunctionMode):
    """A context that records pure operations, or takes their results from the record.

    Values are numbered, not tensors: a buffer's copy has the buffer's number, and a result that was freed and is
    computed again has its old number.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.replaying = False
        self._device = device
        self._stopped = False
        self._results: dict[Any, _Result] = {}
        self._known: dict[int, _Known] = {}
        self._last = 0

    def __enter__(self) -> Self:
        self._stopped = False
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def stop(self) -> None:
        """From now on, operations just run."""
        self._stopped = True

    def forget(self) -> None:
        """Let go of all results."""
        self._results.clear()
        self._known.clear()

    def shared(self) -> bool:
        """Tell whether a slow operation was recorded whose result is still there."""
        return any(result.kept and result.tensor is not None for result in self._results.values())

    def results(self) -> list[Tensor]:
        """Return the recorded results that are still there."""
        return [tensor for result in self._results.values() if (tensor := result.tensor) is not None]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        # without gradients the forward pass of a custom function may run, whose results are changed afterwards
        if self._stopped or not (func in LIGHT or func in HEAVY) or not torch.is_grad_enabled():
            return func(*args, **named)
        try:
            key = self._key(func, args, named)
        except _UnknownArgument:
            return func(*args, **named)
        recorded = self._results.get(key) if self.replaying else None
        if recorded is not None and not recorded.in_place and (known := recorded.tensor) is not None:
            return known
        changed = args[0] if args and isinstance(args[0], Tensor) else None
        version = None if changed is None else changed._version
        result = func(*args, **named)
        if not isinstance(result, Tensor) or (result is changed and result._version == version):
            return result
        number = self._number_of(args[0]) if func is Tensor.clone else recorded.number if recorded else self._next()
        self._known[id(result)] = _Known(TensorWeakRef(result), number, result._version)
        if not self.replaying:
            self._results[key] = _Result(result, number, func in HEAVY, in_place=result is changed)
        if func is F.batch_norm:
            for statistic in _running_statistics(*args, **named):
                self._known.pop(id(statistic), None)  # changed, but their versions do not show it
        return result

    def _key(self, func: Any, args: Any, named: Mapping[str, Any]) -> Any:
        """Return all facts that decide the values of a result."""
        if func is F.batch_norm:
            args, named = _batch_norm_inputs(*args, **named), {}
        mode = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)
        return func, mode, self._fact(args), tuple((name, self._fact(value)) for name, value in named.items())

    def _fact(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Tensor, self._number_of(value)
        if isinstance(value, tuple | list):
            return tuple(map(self._fact, value))
        if isinstance(value, PLAIN):
            return type(value), value  # 1, 1.0 and True are equal
        raise _UnknownArgument

    def _number_of(self, tensor: Tensor) -> int:
        known = self._known.get(id(tensor))
        if known is None or known.tensor() is not tensor or known.version != tensor._version:
            known = self._known[id(tensor)] = _Known(TensorWeakRef(tensor), self._next(), tensor._version)
        return known.number

    def _next(self) -> int:
        self._last += 1
        return self._last


def _batch_norm_inputs(
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,  # noqa: ARG001
    eps: float = 1e-5,
) -> tuple[Any, ...]:
    """Return the arguments of `F.batch_norm` that decide its result: in training, no running statistics."""
    return (input, weight, bias, eps) if training else (input, running_mean, running_var, weight, bias, eps)


def _running_statistics(
    input: Tensor,  # noqa: A002, ARG001
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,  # noqa: ARG001
    bias: Tensor | None = None,  # noqa: ARG001
    training: bool = False,
    **_: object,
) -> list[Tensor]:
    """Return the arguments of `F.batch_norm` that it changes."""
    return [each for each in (running_mean, running_var) if each is not None] if training else []
