"""Frobenius decay: the gradient of λ/2 · ‖L R‖²_F for every pair of factors, through r×r Gram matrices.

∂L = λ L (R Rᵀ) and ∂R = λ (Lᵀ L) R. The product L R is never formed.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedhm.lowrank.layers import LowRank


def low_rank_layers(hybrid: nn.Module) -> list[LowRank]:
    """Return the factorized layers of a network."""
    return [layer for layer in hybrid.modules() if isinstance(layer, LowRank)]


@torch.no_grad()
def add_frobenius_decay(layers: Iterable[LowRank], strength: float) -> None:
    """Add the Frobenius decay of `layers` to their gradients, after `backward` and before the optimizer's step."""
    for layer in layers:
        along_u, along_v = layer.u.grad, layer.v.grad
        if along_u is not None and along_v is not None:
            u, v = _by_rank(layer.u, 0), _by_rank(layer.v, 1)
            _add_product(along_u, 0, v.T @ v, u, strength)
            _add_product(along_v, 1, v, u @ u.T, strength)


def _by_rank(factor: Tensor, axis: int) -> Tensor:
    """Flatten all axes of a factor except that of its rank: u → (r, ·), v → (·, r).

    The order of the flattened axes does not matter to a Gram matrix. Channels come last, as in memory, so that nothing
    is copied.
    """
    by_channel = factor.movedim(1, -1)
    return by_channel.flatten(1) if axis == 0 else by_channel.flatten(0, -2)


def _add_product(gradient: Tensor, axis: int, first: Tensor, second: Tensor, strength: float) -> None:
    by_channel = gradient.movedim(1, -1)
    shape = (len(by_channel), -1) if axis == 0 else (-1, by_channel.shape[-1])
    try:
        by_channel.view(shape).addmm_(first, second, alpha=strength)
    except RuntimeError:  # a gradient in another memory format has no such view
        changed = by_channel.reshape(shape).addmm_(first, second, alpha=strength)
        by_channel.copy_(changed.view(by_channel.shape))
