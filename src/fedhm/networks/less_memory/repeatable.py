"""Whether blocks of a network do the same again: with checkpointing they run twice, and both times must be alike."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedhm.errors import FedhmError
from fedhm.machine.device import seeded
from fedhm.networks.inputs import Inputs, scores
from fedhm.networks.less_memory.checkpointing import Pass, contexts, find_blocks
from fedhm.networks.structure import copied


def can_checkpoint(network: nn.Module, sample: Inputs) -> bool:
    """Tell whether a network has blocks, and all of them do the same again; `sample` is a batch of one input."""
    return bool(find_blocks(network)) and unrepeatable(network, True, sample) is None


def check_repeats(network: nn.Module, asked: bool | Sequence[str], sample: Inputs) -> None:
    """Refuse to checkpoint blocks that do not repeat themselves."""
    if asked and (name := unrepeatable(network, asked, sample)) is not None:
        raise FedhmError(
            f"train.checkpointing: '{name}' gives other outputs when it runs again, and its gradients would be wrong: "
            "it draws from a generator of its own, or remembers its calls; name other modules in train.checkpointing, "
            "or set it to false"
        )


def unrepeatable(network: nn.Module, asked: bool | Sequence[str], sample: Inputs) -> str | None:
    """Return the name of a block that gives other outputs when it runs again; None if there is none.

    Such a block draws from a generator of its own, or counts its calls. `sample` is a batch of one input; noise takes
    its place, since what a network makes of zeros may be zeros whatever it draws.
    """
    network = copied(network).train()
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
            scores(network, _noise_like(sample))
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
