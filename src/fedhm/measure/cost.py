"""What a network costs: parameters, multiply-accumulates, bytes to send, and memory in training."""

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

from fedhm.config.schema import TrainConfig
from fedhm.errors import FedhmError
from fedhm.machine.process import MMAP_THRESHOLD
from fedhm.networks.exchange import exchanged_tensors, size_in_bytes
from fedhm.networks.inputs import Inputs, forward_batch, repeat_batch, sample_shape, select_rows, tensors_of
from fedhm.networks.saving import checkpoint_blocks
from fedhm.networks.sgd import SGD, Optimizer, ParameterGroup
from fedhm.networks.structure import heaviest_in_training, networks_in_training


class OperationWatch(TorchDispatchMode):
    """A context whose `__torch_dispatch__` sees every operation of torch, without importing torch's compiler.

    Torch keeps its compiler away from such contexts, and imports the compiler to do so. That takes over a second, about
    as long as a small run. As long as nothing has imported the compiler, nothing is compiled.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def flop_counter(formulas: dict[Any, Callable[..., int]], by_module: bool = True) -> FlopCounterMode:
    """Return torch's counter of flops, with formulas for operations that it does not know.

    Without `by_module` it only counts the whole network: following the modules takes longer than a small network runs.
    """
    kind = FlopCounterMode if "torch._dynamo" in sys.modules else _FlopCounter
    counter = kind(display=False, custom_mapping=formulas)
    if not by_module:
        counter.mod_tracker = _OneModule()  # type: ignore[assignment]
    return counter


class _OneModule:
    """A module tracker that follows no modules: the counter adds all operations to the whole network."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _FlopWatch(_FlopCounterMode):
    """Torch's counting context without the wrapper that imports the compiler."""

    __torch_dispatch__ = getattr(_FlopCounterMode.__torch_dispatch__, "__wrapped__", None) or (
        _FlopCounterMode.__torch_dispatch__  # of a torch that does not wrap it
    )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _FlopCounter(FlopCounterMode):
    """Torch's counter of flops with `_FlopWatch` as its context."""

    def __enter__(self) -> Self:
        self.flop_counts.clear()
        self.mod_tracker.__enter__()
        self.mode = _FlopWatch(self)
        self.mode.__enter__()  # type: ignore[no-untyped-call]
        return self


# oneDNN convolves copies of the weights in an order of its own, and sums their gradients in such a copy too.
# By operation: the position of the weight among the arguments, and the number of copies.
COPIES = {torch.ops.aten.convolution.default: (1, 1), torch.ops.aten.convolution_backward.default: (2, 2)}

# oneDNN generates code for every different convolution and keeps it: about so many bytes, whatever the sizes of the
# tensors (measured by `benchmarks/convolution_code.py`).
FORWARD, OF_INPUTS, OF_WEIGHTS = 90_000, 120_000, 50_000


class AliveBytes(OperationWatch):
    """Counts the bytes of all living tensors, from the operation that makes each to its end, and their peak.

    The peak includes the copies that convolutions make while they run. Torch has such a counter for GPUs only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._small = self._heap = 0  # bytes in small blocks: now, and the most so far
        self._known: set[int] = set()
        self._convolutions: dict[tuple[Any, ...], int] = {}  # the bytes of code of each different convolution

    @property
    def kept(self) -> int:
        """Return the bytes of code that oneDNN keeps for convolutions."""
        return sum(self._convolutions.values())

    def see(self, tensor: Tensor) -> None:
        """Count the memory of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage._cdata)
        self._count(size)
        weakref.finalize(storage, self._gone, storage._cdata, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._count(-size)

    def _count(self, size: int) -> None:
        self.alive += size
        if abs(size) < MMAP_THRESHOLD:
            self._small += size
            self._heap = max(self._heap, self._small)
        self.peak = max(self.peak, self.resident)

    @property
    def resident(self) -> int:
        """Return the bytes of living tensors, plus small blocks that were freed: these stay in the heap."""
        return self.alive - self._small + self._heap

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        if func in COPIES:
            position, copies = COPIES[func]
            self.peak = max(self.peak, self.resident + copies * args[position].nbytes)
            self._convolutions[_kind(func, args)] = _code(func, args)
        return result


def _kind(func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return all facts that decide which code a convolution runs."""
    return func, *(tuple(a.shape) if isinstance(a, Tensor) else str(a) for a in args)


def _code(func: Any, args: Sequence[Any]) -> int:
    if func is torch.ops.aten.convolution.default:
        return FORWARD
    of_inputs, of_weights, _ = args[-1]
    return int(of_inputs * OF_INPUTS + of_weights * OF_WEIGHTS)


@dataclass(frozen=True)
class Cost:
    """What a network costs."""

    parameters: int  # trainable
    macs: int  # multiply-accumulates of one sample's forward pass, without operations done once for a batch
    bytes: int  # of one transfer of the network, in one direction


@dataclass(frozen=True)
class LayerCost:
    """What one part of a network costs."""

    parameters: int
    macs: int


# the shape of one input, or a batch of one if it is several tensors
SampleSpec = tuple[int, ...] | tuple[Tensor, ...] | dict[str, Tensor]
ROOT = "(model)"  # the parameters and operations of a model outside its parts
WHOLE = "Global"  # the counter's name for the whole model


def measure(model: nn.Module, input_shape: SampleSpec, dtype: torch.dtype | None = None) -> Cost:
    """Measure the cost of `model` on one input of `input_shape`, without the batch axis: (3, 32, 32).

    Inputs have the type of the weights, or `dtype`, such as torch.int64 for a model that reads tokens. For a model that
    takes several tensors by name, `input_shape` is a batch of one with these tensors.
    """
    macs = sum(
        share * _macs(each, input_shape, dtype, by_module=False)[WHOLE] for each, share in networks_in_training(model)
    )
    return Cost(_trainable(model.parameters()), int(macs), size_in_bytes(exchanged_tensors(model)))


def sample_spec(inputs: Inputs) -> tuple[SampleSpec, torch.dtype | None]:
    """Return the arguments `input_shape` and `dtype` of `measure` for inputs like these, a batch of one."""
    return (tuple(inputs.shape[1:]), inputs.dtype) if isinstance(inputs, Tensor) else (inputs, None)


def cost_by_layer(model: nn.Module, input_shape: SampleSpec, dtype: torch.dtype | None = None) -> dict[str, LayerCost]:
    """Return the cost of each top-level part. A shared weight counts for its first owner."""
    macs = _macs(model, input_shape, dtype, by_module=True)
    name_of_model = type(model).__name__  # the counter's names of the parts begin with it: CNN.conv1
    counted: set[Tensor] = set()
    parts: dict[str, LayerCost] = {}
    for name, part in model.named_children():
        own = set(part.parameters()) - counted
        counted |= own
        parts[name] = LayerCost(_trainable(own), macs.get(f"{name_of_model}.{name}", 0))
    outside = _trainable(set(model.parameters()) - counted)
    rest = macs[WHOLE] - sum(part.macs for part in parts.values())
    return parts | ({ROOT: LayerCost(outside, rest)} if outside or rest else {})


def cost_of_modules(model: nn.Module, input_shape: SampleSpec, names: Iterable[str]) -> dict[str, LayerCost]:
    """Return the cost of modules at any depth by their qualified names. A weight of two modules counts for both."""
    macs, name_of_model = _macs(model, input_shape, None, by_module=True), type(model).__name__
    return {
        name: LayerCost(_trainable(model.get_submodule(name).parameters()), macs.get(f"{name_of_model}.{name}", 0))
        for name in names
    }


def _trainable(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in parameters if p.requires_grad)


def _macs(model: nn.Module, input_shape: SampleSpec, dtype: torch.dtype | None, by_module: bool) -> dict[str, int]:
    """Count one sample's multiply-accumulates, by module and as a whole.

    It is the difference between batches of two and one. So operations done once for a batch, such as composing weights,
    do not count.
    """
    try:
        one, two = (_flops(model, zero_batch(model, batch, input_shape, dtype), by_module) for batch in (1, 2))
    except Exception as error:  # of the user's model
        raise FedhmError(f"the model does not accept one input of shape {_shape(input_shape)}: {error}") from error
    return {module: (flops - one.get(module, 0)) // 2 for module, flops in two.items()}


def training_memory(
    model: nn.Module,
    input_shape: SampleSpec,
    batch: int,
    dtype: torch.dtype | None = None,
    *,
    optimizer: str = "sgd",
    micro_batch: int = 0,
    checkpointing: bool | Sequence[str] = False,
) -> int:
    """Return the peak bytes of memory of one training step on `batch` samples.

    `optimizer` is "sgd", with momentum, or "adamw"; `micro_batch` and `checkpointing` are those of `[train]`. Weights,
    gradients, the optimizer's averages, activations and temporary tensors count. The step changes the model. A process
    grows by as much if it returns freed memory to the system at once (`return_freed_memory`).
    """
    if optimizer not in OPTIMIZERS:
        raise FedhmError(f"there is no optimizer '{optimizer}': choose {' or '.join(OPTIMIZERS)}")
    model = heaviest_in_training(model)
    watch = AliveBytes()
    parts = -(-batch // micro_batch) if 0 < micro_batch < batch else 1
    checkpoint_blocks([each for each, _ in networks_in_training(model)], checkpointing)
    try:
        inputs = zero_batch(model, batch, input_shape, dtype)
        stepping = OPTIMIZERS[optimizer]([p for p in model.train().parameters() if p.requires_grad])
        for tensor in [*model.parameters(), *model.buffers(), *tensors_of(inputs)]:
            watch.see(tensor)
        with watch:
            _make_averages(stepping, model)
            # a third part has the same memory as the second
            for rows in torch.arange(batch).split(micro_batch)[:2] if parts > 1 else [None]:
                part = inputs if rows is None else select_rows(inputs, rows)
                output = forward_batch(model, part)
                output.logsumexp(-1).sum().backward()
            stepping.step()
            for other, _ in networks_in_training(model)[1:]:  # they run in other batches, or beside it
                forward_batch(other.train(), part).logsumexp(-1).sum().backward()
                other.zero_grad()
    except Exception as error:
        shape = (batch, *_shape(input_shape))
        raise FedhmError(f"the model cannot be trained on a batch of shape {shape}: {error}") from error
    return watch.peak + watch.kept


def _make_averages(stepping: Optimizer, model: nn.Module) -> None:
    """Make a first step on zero gradients, in which an optimizer makes its averages."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    stepping.step()
    stepping.zero_grad()


# Each has as many averages of gradients as in a run; the learning rate does not matter to memory.
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD([ParameterGroup(parameters)], lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def _flops(model: nn.Module, inputs: Inputs, by_module: bool) -> dict[str, int]:
    counter = flop_counter({torch.ops.aten.mkldnn_rnn_layer: _lstm_flops}, by_module)
    with torch.no_grad(), _evaluating(model), _unfused_attention(), counter:
        forward_batch(model, inputs)
    return {WHOLE: 0} | {module: sum(by_kind.values()) for module, by_kind in counter.get_flop_counts().items()}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and afterwards restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        model.train(modes[0][1])
        for module, mode in modes:
            module.training = mode


@contextmanager
def _unfused_attention() -> Iterator[None]:
    """Disable fused attention kernels, which hide their products from the counter."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _lstm_flops(x: Sequence[int], to_input: Sequence[int], to_hidden: Sequence[int], *_: Any, **__: Any) -> int:
    """Count the flops of one layer and direction of an LSTM as torch counts them unfused: x (time, batch, features)."""
    return 2 * x[0] * x[1] * (math.prod(to_input) + math.prod(to_hidden))


def _several(spec: SampleSpec) -> Inputs | None:
    """Return the batch of one that a spec of several tensors is; None for the shape of a single tensor."""
    if isinstance(spec, dict):
        return spec
    given = tuple(each for each in spec if isinstance(each, Tensor))
    return given or None


def _shape(spec: SampleSpec) -> tuple[int, ...]:
    several = _several(spec)
    return tuple(int(size) for size in spec) if several is None else sample_shape(several)


def zero_batch(model: nn.Module, batch: int, shape: SampleSpec, dtype: torch.dtype | None) -> Inputs:
    """Return a batch of zeros, or the given tensors repeated, on the device of the model."""
    if (several := _several(shape)) is not None:
        return repeat_batch(several, batch)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    return torch.zeros(batch, *_shape(shape), dtype=dtype or like.dtype, device=like.device)


def configured_training_memory(
    network: nn.Module, input_shape: SampleSpec, train: TrainConfig, dtype: torch.dtype | None = None
) -> int:
    """Return the peak bytes of memory of a training step by the settings of `[train]`."""
    return training_memory(
        network,
        input_shape,
        train.batch,
        dtype,
        optimizer=train.optimizer,
        micro_batch=train.micro_batch,
        checkpointing=train.checkpointing,
    )
