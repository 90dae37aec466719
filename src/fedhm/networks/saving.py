"""A batch in parts: their gradients add up to the batch's, and only one part's activations are in memory at a time."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fedhm.errors import FedhmError
from fedhm.machine.device import seeded
from fedhm.networks.inputs import Inputs, forward_batch, select_rows
from fedhm.networks.structure import copy_network

Loss = Callable[[Inputs, Tensor], Tensor]  # mean over the inputs and targets of a part


def backward_in_parts(
    loss_of: Loss, inputs: Inputs, targets: Tensor, most: int, trained: Sequence[nn.Parameter]
) -> Tensor:
    """Leave the gradient of a batch's mean loss in the parameters, and return that loss.

    most  samples in a part; 0: the whole batch is one
    """
    if not most or len(targets) <= most:
        loss = loss_of(inputs, targets)
        loss.backward()
        return loss.detach()
    total = torch.zeros((), device=targets.device)
    before = 0
    for rows in split_batches(torch.arange(len(targets), device=targets.device), most):
        # Not losses are weighted but what they add to: whatever else a loss does to gradients is weighted with it.
        _scale(trained, before / len(rows))
        loss = loss_of(select_rows(inputs, rows), targets[rows])
        loss.backward()
        total = total + loss.detach() * (len(rows) / len(targets))
        before = len(rows)
    _scale(trained, before / len(targets))
    return total


def split_batches(order: Tensor, size: int) -> list[Tensor]:
    """Split into batches; a single last sample joins the batch before: BatchNorm has no variance of a single value."""
    parts = list(order.split(size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


@torch.no_grad()
def _scale(trained: Sequence[nn.Parameter], share: float) -> None:
    if share != 1:
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.mul_(share)


# Activation checkpointing: blocks of a network keep their inputs only, and run again when their gradients are needed.
#
# It is torch's own, with what it leaves to its users: the second run has the very weights and buffers of the first,
# also where a smaller network runs with parts of a larger one's, or a pass changes buffers that it computes with; it
# does not count for running averages; and what draws from Python's or NumPy's generators draws the same numbers, as
# torch's own generators do.


def find_blocks(network: nn.Module) -> list[str]:
    """Return the names of a network's blocks: what is listed in a Sequential or ModuleList and has layers inside.

    Of blocks inside one another the outermost.
    """
    found: list[str] = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Sequential | nn.ModuleList) and not _inside(name, found):
            children = ((f"{name}.{key}" if name else key, child) for key, child in module.named_children())
            found += [path for path, child in children if _is_block(child)]
    return found


def check_blocks(network: nn.Module, asked: bool | Sequence[str]) -> None:
    """Refuse blocks that a network does not have."""
    known = dict(network.named_modules())
    if asked is True and not find_blocks(network):
        raise FedhmError(
            "train.checkpointing = true, but the model has no blocks, modules with layers inside that a Sequential or "
            "ModuleList lists: name some of its modules, such as "
            f"train.checkpointing = {[name for name in known if name][:2]}"
        )
    if isinstance(asked, bool):
        return
    if unknown := [name for name in asked if not name or name not in known]:
        raise FedhmError(f"train.checkpointing: the model has no module '{unknown[0]}'")
    if within := [name for name in asked if _inside(name, [other for other in asked if other != name])]:
        raise FedhmError(f"train.checkpointing: '{within[0]}' lies inside another module of the list")


def checkpoint_blocks(networks: Iterable[nn.Module], asked: bool | Sequence[str]) -> None:
    """Have blocks of networks, which are to be thrown away after training, run again in the backward pass."""
    for network in networks:
        if not asked:
            continue
        names = find_blocks(network) if asked is True else asked
        for name in names:
            _recompute(network.get_submodule(name))


def _is_block(module: nn.Module) -> bool:
    listing = isinstance(module, nn.Sequential | nn.ModuleList) and any(map(_is_block, module.children()))
    return not listing and any(True for _ in module.children()) and any(True for _ in module.parameters())


def _inside(name: str, others: Iterable[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in others)


def _recompute(block: nn.Module) -> None:
    if not isinstance(block.forward, _CheckpointedForward):
        vars(block)["forward"] = _CheckpointedForward(block)


class _CheckpointedForward:
    """The `forward` of a block that runs again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        self._block, self._plain = block, block.forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*arguments, **named)
        run = Pass(self._block, self._plain)
        return checkpoint(run, *arguments, use_reentrant=False, context_fn=contexts, **named)


class Pass:
    """One pass through a block, which can be repeated: with its weights, which may be parts of another network's, and
    with the buffers as they were before, so that averages that it makes of its inputs are made once.
    """

    def __init__(self, block: nn.Module, plain: Callable[..., Any]) -> None:
        self._again = _Again(block, plain)
        self._weights = dict(self._again.named_parameters())
        self._buffers = dict(self._again.named_buffers())
        self._before: dict[str, Tensor] | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._before is None:
            before = {name: buffer.clone() for name, buffer in self._buffers.items()}
            result = self._again(*arguments, **named)
            # What was not written to need not be kept twice. Versions do not tell: BatchNorm leaves those as they are.
            self._before = {n: t for n, t in before.items() if t.is_meta or not torch.equal(t, self._buffers[n])}
            return result
        buffers = self._buffers | {name: tensor.clone() for name, tensor in self._before.items()}
        return torch.func.functional_call(self._again, self._weights | buffers, arguments, named)


class _Again(nn.Module):
    """A block without its own hooks, which have run when its `forward` is called."""

    def __init__(self, block: nn.Module, plain: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self._plain = block, plain

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self._plain(*arguments, **named)


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what the first pass runs in, and what one that repeats it does; torch sees to its own generators."""
    return nullcontext(), _drawing_again(random.getstate(), np.random.get_state())


@contextmanager
def _drawing_again(python: Any, numpy: Any) -> Iterator[None]:
    """Let a block draw the numbers that it drew before; afterwards others are drawn as if it had not."""
    after = random.getstate(), np.random.get_state()
    random.setstate(python)
    np.random.set_state(numpy)
    try:
        yield
    finally:
        random.setstate(after[0])
        np.random.set_state(after[1])


# Whether blocks of a network do the same again: with checkpointing they run twice, and both times must be alike.


def can_checkpoint(network: nn.Module, sample: Inputs) -> bool:
    """Tell whether a network has blocks, and all of them do the same again; `sample` is a batch of one input."""
    return bool(find_blocks(network)) and find_unrepeatable_block(network, True, sample) is None


def check_repeatable(network: nn.Module, asked: bool | Sequence[str], sample: Inputs) -> None:
    """Refuse to checkpoint blocks that do not repeat themselves."""
    if asked and (name := find_unrepeatable_block(network, asked, sample)) is not None:
        raise FedhmError(
            f"train.checkpointing: '{name}' gives other outputs when it runs again, and its gradients would be wrong: "
            "it draws from a generator of its own, or remembers its calls; name other modules in train.checkpointing, "
            "or set it to false"
        )


def find_unrepeatable_block(network: nn.Module, asked: bool | Sequence[str], sample: Inputs) -> str | None:
    """Return the name of a block that gives other outputs when it runs again; None if there is none.

    Such a block draws from a generator of its own, or counts its calls. `sample` is a batch of one input; noise takes
    its place, since what a network makes of zeros may be zeros whatever it draws.
    """
    network = copy_network(network).train()
    other: list[str] = []

    def run_twice(name: str, block: nn.Module) -> None:
        plain = block.forward

        def forward(*arguments: Any, **named: Any) -> Any:
            one = Pass(block, plain)
            _, again = contexts()
            drawn = torch.get_rng_state()
            first = one(*arguments, **named)
            with again, torch.random.fork_rng([]):
                torch.set_rng_state(drawn)
                second = one(*arguments, **named)
            if not _same(first, second):
                other.append(name)
            return first

        vars(block)["forward"] = forward

    for name in find_blocks(network) if asked is True else asked or ():
        run_twice(name, network.get_submodule(name))
    try:
        with torch.no_grad(), seeded(0):
            forward_batch(network, _noise_like(sample))
    except Exception:  # whatever a foreign model raises: it may train on other batches, and clients will say if not
        return None
    return other[0] if other else None


def _noise_like(sample: Inputs) -> Inputs:
    """Return a batch of two inputs, of noise where these are not whole numbers."""
    noise = torch.Generator().manual_seed(0)

    def drawn(tensor: Tensor) -> Tensor:
        two = torch.cat([tensor] * 2)
        return torch.randn(two.shape, generator=noise).to(two) if two.is_floating_point() else two

    return {n: drawn(t) for n, t in sample.items()} if isinstance(sample, dict) else drawn(sample)


def _same(first: Any, second: Any) -> bool:
    ones, others = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (first, second))
    return len(ones) == len(others) and all(
        torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(ones, others, strict=True)
    )
