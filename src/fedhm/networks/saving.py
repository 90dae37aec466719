"""Less memory in training: batches in parts, and activation checkpointing."""

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
from fedhm.machine.memory import lacks_memory
from fedhm.networks.inputs import Inputs, forward_batch, map_tensors, select_rows
from fedhm.networks.structure import copy_network

Loss = Callable[[Inputs, Tensor], Tensor]  # the mean over the inputs and targets of a part


def backward_in_parts(
    loss_of: Loss,
    inputs: Inputs,
    targets: Tensor,
    most: int,
    trained: Sequence[nn.Parameter],
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> Tensor:
    """Leave the gradient of a batch's mean loss in the parameters, and return that loss.

    The gradients of the parts add up to the gradient of the batch, and only the activations of one part are in memory
    at a time.

    most      samples in a part; 0: the whole batch is one part
    backward  adds the gradients of a loss
    """
    if not most or len(targets) <= most:
        loss = loss_of(inputs, targets)
        backward(loss)
        return loss.detach()
    total = torch.zeros((), device=targets.device)
    before = 0
    for rows in split_batches(torch.arange(len(targets), device=targets.device), most):
        # The gradients are weighted instead of the losses: a loss may itself add to gradients, which is weighted too.
        _scale(trained, before / len(rows))
        loss = loss_of(select_rows(inputs, rows), targets[rows])
        backward(loss)
        total = total + loss.detach() * (len(rows) / len(targets))
        before = len(rows)
    _scale(trained, before / len(targets))
    return total


def split_batches(order: Tensor, size: int) -> list[Tensor]:
    """Split into batches. A single last sample joins the batch before it: one value has no variance for BatchNorm."""
    parts = list(order.split(size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def count_batches(samples: int, size: int) -> int:
    """Return into how many batches `split_batches` splits samples."""
    parts = -(-samples // size)
    return parts - 1 if parts > 1 and samples - (parts - 1) * size == 1 else parts


@torch.no_grad()
def _scale(trained: Sequence[nn.Parameter], share: float) -> None:
    if share != 1:
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.mul_(share)


def find_blocks(network: nn.Module) -> list[str]:
    """Return the names of a network's blocks: modules in a Sequential or ModuleList that have layers inside.

    Of nested blocks only the outermost counts.
    """
    found: list[str] = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Sequential | nn.ModuleList) and not _inside(name, found):
            children = ((f"{name}.{key}" if name else key, child) for key, child in module.named_children())
            found += [path for path, child in children if _is_block(child)]
    return found


def check_blocks(network: nn.Module, asked: bool | Sequence[str]) -> None:
    """Raise if the network does not have the blocks that `train.checkpointing` asks for."""
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
    """Make blocks keep only their inputs, and run again in the backward pass. The networks are changed for good.

    This is torch's checkpointing, with three additions. The second run has the weights and buffers of the first, also
    if a smaller network runs with parts of a larger one's, or a pass changes buffers that it computes with. It does not
    count for running averages. And Python's and NumPy's generators draw the same numbers again, as torch's do.
    """
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
    """One pass through a block that can be repeated.

    The second run has the weights of the first, which may be parts of another network's weights. It has copies of the
    buffers as they were before, so that running averages are updated once.
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
            # Only changed buffers are kept. Version counters do not show a change: BatchNorm does not raise them.
            self._before = {n: t for n, t in before.items() if t.is_meta or not torch.equal(t, self._buffers[n])}
            return result
        buffers = self._buffers | {name: tensor.clone() for name, tensor in self._before.items()}
        return torch.func.functional_call(self._again, self._weights | buffers, arguments, named)


class _Again(nn.Module):
    """A block without its own hooks: they have already run when its `forward` is called."""

    def __init__(self, block: nn.Module, plain: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self._plain = block, plain

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self._plain(*arguments, **named)


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first pass and of its repetition. Torch restores its own generators itself."""
    return nullcontext(), _drawing_again(random.getstate(), np.random.get_state())


@contextmanager
def _drawing_again(python: Any, numpy: Any) -> Iterator[None]:
    """Set Python's and NumPy's generators back for a repetition, and restore them afterwards."""
    after = random.getstate(), np.random.get_state()
    random.setstate(python)
    np.random.set_state(numpy)
    try:
        yield
    finally:
        random.setstate(after[0])
        np.random.set_state(after[1])


def can_checkpoint(network: nn.Module, sample: Inputs) -> bool:
    """Tell whether a network has blocks, and all of them can be repeated; `sample` is a batch of one input."""
    return bool(find_blocks(network)) and find_unrepeatable_block(network, True, sample) is None


def check_repeatable(network: nn.Module, asked: bool | Sequence[str], sample: Inputs) -> None:
    """Raise if a block that is to be checkpointed gives other outputs when it runs again."""
    if asked and (name := find_unrepeatable_block(network, asked, sample)) is not None:
        raise FedhmError(
            f"train.checkpointing: '{name}' gives other outputs when it runs again, and its gradients would be wrong: "
            "it draws from a generator of its own, or remembers its calls; name other modules in train.checkpointing, "
            "or set it to false"
        )


def find_unrepeatable_block(network: nn.Module, asked: bool | Sequence[str], sample: Inputs) -> str | None:
    """Return the name of a block that gives other outputs when it runs again, or None.

    Such a block draws from a generator of its own, or counts its calls. `sample` is a batch of one input. Noise takes
    its place, since the output for zeros may be zeros whatever the block draws.
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
    except Exception as error:  # of the user's model: it may train on other batches, and clients report if it does not
        if lacks_memory(error):
            raise
        return None
    return other[0] if other else None


def _noise_like(sample: Inputs) -> Inputs:
    """Return a batch of two inputs: noise in place of real numbers, and integers as they are."""
    noise = torch.Generator().manual_seed(0)

    def drawn(tensor: Tensor) -> Tensor:
        two = torch.cat([tensor] * 2)
        return torch.randn(two.shape, generator=noise).to(two) if two.is_floating_point() else two

    return map_tensors(drawn, sample)


def _same(first: Any, second: Any) -> bool:
    ones, others = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (first, second))
    return len(ones) == len(others) and all(
        torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(ones, others, strict=True)
    )
