"""Frobenius decay: the gradient of λ/2 · ‖L R‖²_F for every factor pair, through r×r Gram matrices.

∂L = λ L (R Rᵀ) and ∂R = λ (Lᵀ L) R: the product L R is never formed.
"""

import torch
from torch import nn

from fedhm.lowrank.layers import LowRank
from fedhm.lowrank.unroll import join, split


@torch.no_grad()
def add_frobenius_decay(hybrid: nn.Module, strength: float) -> None:
    """Adds the decay to the gradients, after `backward` and before the optimizer's step."""
    for layer in hybrid.modules():
        if isinstance(layer, LowRank) and layer.u.grad is not None and layer.v.grad is not None:
            left, right = join(layer.u, layer.v)
            along_u, along_v = split(left @ (right @ right.T), (left.T @ left) @ right, layer.dense_shape)
            layer.u.grad.add_(along_u, alpha=strength)
            layer.v.grad.add_(along_v, alpha=strength)
