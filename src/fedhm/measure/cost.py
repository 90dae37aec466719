"""What a network costs: parameters, multiply-accumulates, bytes on the wire, memory in training."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedhm.errors import FedhmError
from fedhm.measure.alive import AliveBytes
from fedhm.measure.watching import flop_counter
from fedhm.networks.exchange import exchanged, size_in_bytes
from fedhm.networks.inputs import Inputs, repeated, rows_of, scores, shape_of
from fedhm.networks.less_memory.checkpointing import checkpoint_blocks
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


Form = tuple[int, ...] | dict[str, Tensor]  # of an input: its shape, or of several tensors a batch of one
ROOT = "(model)"  # what a model has or computes outside its parts
WHOLE = "Global"  # how the counter calls the model


def measure(model: nn.Module, input_shape: Form, dtype: torch.dtype | None = None) -> Cost:
    """Measure the cost of `model` on one input of `input_shape`, without the batch axis: (3, 32, 32).

    Inputs are of the weights' type; `dtype` names another, such as torch.int64 for a model that reads tokens. For a
    model that takes several tensors by name, `input_shape` is a batch of one of these.
    """
    macs = sum(
        share * _macs(each, input_shape, dtype, by_module=False)[WHOLE] for each, share in run_in_training(model)
    )
    return Cost(_trainable(model.parameters()), int(macs), size_in_bytes(exchanged(model)))


def form_of(inputs: Inputs) -> tuple[Form, torch.dtype | None]:
    """Return what `measure` is to be told of inputs like these, a batch of one."""
    return (inputs, None) if isinstance(inputs, dict) else (tuple(inputs.shape[1:]), inputs.dtype)


def by_layer(model: nn.Module, input_shape: Form, dtype: torch.dtype | None = None) -> dict[str, LayerCost]:
    """Return each top-level part's share of what `measure` counts; a shared weight is its first owner's."""
    macs = _macs(model, input_shape, dtype, by_module=True)
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


def _macs(model: nn.Module, input_shape: Form, dtype: torch.dtype | None, by_module: bool) -> dict[str, int]:
    """Count one sample's multiply-accumulates, by module and as a whole, without composing weights for each batch."""
    try:
        one, two = (_flops(model, sample_of(model, batch, input_shape, dtype), by_module) for batch in (1, 2))
    except Exception as error:  # whatever a foreign model raises
        raise FedhmError(f"the model does not accept one input of shape {_shape(input_shape)}: {error}") from error
    return {module: (flops - one.get(module, 0)) // 2 for module, flops in two.items()}


def training_memory(
    model: nn.Module,
    input_shape: Form,
    batch: int,
    dtype: torch.dtype | None = None,
    *,
    optimizer: str = "sgd",
    micro_batch: int = 0,
    checkpointing: bool | Sequence[str] = False,
) -> int:
    """Return the most bytes that one step of an optimizer on `batch` samples has in memory at once.

    `optimizer` is "sgd", with momentum, or "adamw"; `micro_batch` and `checkpointing` are those of `[train]`. Weights,
    gradients, the optimizer's averages, activations and whatever the step makes on its way count; the model that was
    handed in is changed by the step. A process takes as much above its size before if what is freed is given back to
    the system at once (`machine/allocator.py`).
    """
    model = heaviest_in_training(model)
    watch = AliveBytes()
    parts = -(-batch // micro_batch) if 0 < micro_batch < batch else 1
    checkpoint_blocks([each for each, _ in run_in_training(model)], checkpointing)
    try:
        inputs = sample_of(model, batch, input_shape, dtype)
        stepping = optimizer_of(optimizer, (p for p in model.train().parameters() if p.requires_grad))
        given = list(inputs.values()) if isinstance(inputs, dict) else [inputs]
        for tensor in [*model.parameters(), *model.buffers(), *given]:
            watch.see(tensor)
        with watch:
            _make_averages(stepping, model)
            # a third part finds in memory what the second did
            for rows in torch.arange(batch).split(micro_batch)[:2] if parts > 1 else [None]:
                part = inputs if rows is None else rows_of(inputs, rows)
                output = scores(model, part)
                output.logsumexp(-1).sum().backward()
            stepping.step()
            for other, _ in run_in_training(model)[1:]:  # which run in other batches, or beside it
                scores(other.train(), part).logsumexp(-1).sum().backward()
                other.zero_grad()
    except Exception as error:
        shape = (batch, *_shape(input_shape))
        raise FedhmError(f"the model cannot be trained on a batch of shape {shape}: {error}") from error
    return watch.peak + watch.kept


def _make_averages(stepping: Steps, model: nn.Module) -> None:
    """Let an optimizer make the averages that it has from its second step on."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    stepping.step()
    stepping.zero_grad()


def optimizer_of(name: str, parameters: Iterator[nn.Parameter]) -> Steps:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3)
    return SGD([Group(list(parameters))], lr=1e-3, momentum=0.9)


def _flops(model: nn.Module, inputs: Inputs, by_module: bool) -> dict[str, int]:
    counter = flop_counter({torch.ops.aten.mkldnn_rnn_layer: _lstm_flops}, by_module)
    with torch.no_grad(), _evaluating(model), _unfused_attention(), counter:
        scores(model, inputs)
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


def _shape(form: Form) -> tuple[int, ...]:
    return shape_of(form) if isinstance(form, dict) else tuple(form)


def sample_of(model: nn.Module, batch: int, shape: Form, dtype: torch.dtype | None) -> Inputs:
    if isinstance(shape, dict):
        return repeated(shape, batch)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    return torch.zeros(batch, *shape, dtype=dtype or like.dtype, device=like.device)
