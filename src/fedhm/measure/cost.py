"""What a network costs: parameters, multiply-accumulates, bytes on the wire, memory in training."""

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from fedhm.errors import FedhmError
from fedhm.measure.watching import Watch, flop_counter
from fedhm.networks.checkpointing import checkpoint_blocks
from fedhm.networks.exchange import exchanged, size_in_bytes
from fedhm.networks.sgd import SGD, Group, Steps
from fedhm.networks.structure import heaviest_in_training, run_in_training


@dataclass(frozen=True)
class Cost:
    parameters: int  # trainable
    macs: int  # multiply-accumulates of one sample's forward pass; what is done once for a batch does not count
    bytes: int  # of one transfer of the network, in one direction


@dataclass(frozen=True)
class LayerCost:
    parameters: int
    macs: int


ROOT = "(model)"  # what a model has or computes outside its parts
WHOLE = "Global"  # how the counter calls the model


def measure(model: nn.Module, input_shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Cost:
    """Measure the cost of `model` on one input of `input_shape`, without the batch axis: (3, 32, 32).

    Inputs are of the weights' type; `dtype` names another, such as torch.int64 for a model that reads tokens.
    """
    macs = sum(share * _macs(each, input_shape, dtype)[WHOLE] for each, share in run_in_training(model))
    return Cost(_trainable(model.parameters()), int(macs), size_in_bytes(exchanged(model)))


def by_layer(model: nn.Module, input_shape: tuple[int, ...], dtype: torch.dtype | None = None) -> dict[str, LayerCost]:
    """Return each top-level part's share of what `measure` counts; a shared weight is its first owner's."""
    macs = _macs(model, input_shape, dtype)
    name_of_model = type(model).__name__  # how the counter calls the parts: CNN.conv1
    counted: set[Tensor] = set()
    parts: dict[str, LayerCost] = {}
    for name, part in model.named_children():
        own = set(part.parameters()) - counted
        counted |= own
        parts[name] = LayerCost(_trainable(own), macs.get(f"{name_of_model}.{name}", 0))
    outside = _trainable(set(model.parameters()) - counted)
    rest = macs[WHOLE] - sum(part.macs for part in parts.values())
    return parts | ({ROOT: LayerCost(outside, rest)} if outside or rest else {})


def _trainable(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in parameters if p.requires_grad)


def _macs(model: nn.Module, input_shape: tuple[int, ...], dtype: torch.dtype | None) -> dict[str, int]:
    """Count one sample's multiply-accumulates, by module and as a whole, without composing weights for each batch."""
    try:
        one, two = (_flops(model, _sample(model, batch, input_shape, dtype)) for batch in (1, 2))
    except Exception as error:  # whatever a foreign model raises
        raise FedhmError(f"the model does not accept one input of shape {tuple(input_shape)}: {error}") from error
    return {module: (flops - one.get(module, 0)) // 2 for module, flops in two.items()}


def training_memory(
    model: nn.Module,
    input_shape: tuple[int, ...],
    batch: int,
    dtype: torch.dtype | None = None,
    *,
    optimizer: str = "sgd",
    micro_batch: int = 0,
    checkpointing: bool | Sequence[str] = False,
) -> int:
    """Measure the most bytes of tensors alive at once in one step of an optimizer on `batch` samples.

    `optimizer` is "sgd", with momentum, or "adamw"; `micro_batch` and `checkpointing` are those of `[train]`. Weights,
    gradients, the optimizer's averages, activations and whatever the step makes on its way count; the model that was
    handed in is changed by the step.
    """
    model = heaviest_in_training(model)
    watch = _AliveBytes()
    parts = -(-batch // micro_batch) if 0 < micro_batch < batch else 1
    checkpoint_blocks([each for each, _ in run_in_training(model)], checkpointing)
    try:
        inputs = _sample(model, batch, input_shape, dtype)
        stepping = _optimizer(optimizer, model.train().parameters())
        for tensor in [*model.parameters(), *model.buffers(), inputs]:
            watch.see(tensor)
        with watch:
            for _ in range(2):  # an optimizer's averages exist from the second step on
                stepping.zero_grad()
                for part in inputs.split(micro_batch) if parts > 1 else [inputs]:
                    output = model(part)
                    output.logsumexp(-1).sum().backward()
                stepping.step()
    except Exception as error:
        shape = (batch, *input_shape)
        raise FedhmError(f"the model cannot be trained on a batch of shape {shape}: {error}") from error
    return watch.peak


def _optimizer(name: str, parameters: Iterator[nn.Parameter]) -> Steps:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3)
    return SGD([Group(list(parameters))], lr=1e-3, momentum=0.9)


def _flops(model: nn.Module, inputs: Tensor) -> dict[str, int]:
    counter = flop_counter({torch.ops.aten.mkldnn_rnn_layer: _lstm_flops})
    with torch.no_grad(), _evaluating(model), _unfused_attention(), counter:
        model(inputs)
    return {WHOLE: 0} | {module: sum(by_kind.values()) for module, by_kind in counter.get_flop_counts().items()}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode; afterwards every module is back in its own, which need not be the model's."""
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
    """Disable fused kernels, which hide their products from the counter."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _lstm_flops(x: Sequence[int], to_input: Sequence[int], to_hidden: Sequence[int], *_: Any, **__: Any) -> int:
    """Count the flops of one layer and direction of an LSTM, as torch does if unfused: x (time, batch, features)."""
    return 2 * x[0] * x[1] * (math.prod(to_input) + math.prod(to_hidden))


class _AliveBytes(Watch):
    """The bytes of all living tensors: follows every storage from the operation that made it to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage._cdata)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, storage._cdata, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        return result


def _sample(model: nn.Module, batch: int, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    return torch.zeros(batch, *shape, dtype=dtype or like.dtype, device=like.device)
