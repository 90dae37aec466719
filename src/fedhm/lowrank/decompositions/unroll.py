"""Conversions between the weight of a layer and the matrix that is decomposed.

spatial     A convolution (n, m, k₁, k₂) unrolls to the matrix with rows (m, k₁) and columns (n, k₂): each row belongs
            to one input channel and vertical offset, each column to one output channel and horizontal offset. That is
            a permutation of axes, not a plain reshape, and it is what makes the factors a vertical and a horizontal
            convolution.
pufferfish  Rows (m, k₁, k₂), columns n: the factors are a convolution of the same size into r channels, and a 1×1
            convolution that mixes them.

A Linear weight (n, m) unrolls to its transpose, which is both rules with k₁ = k₂ = 1, and one of a Conv1d (n, m, k) by
both rules with k₂ = 1. The forms differ in the shapes of their matrices, and agree where these do (k₂ = 1): only
unrolling has to be told the form.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Form = Literal["spatial", "pufferfish"]


def unroll(weight: Tensor, form: Form = "spatial") -> Tensor:
    """Unroll a weight: (n, m, k₁, k₂) → (m k₁, n k₂), or (m k₁ k₂, n) in Pufferfish's form; (n, m, k) → (m k, n)."""
    if weight.ndim < 4 or form == "pufferfish":
        return weight.flatten(1).T
    n, m, k1, k2 = weight.shape
    return weight.permute(1, 2, 0, 3).reshape(m * k1, n * k2)


def unrolled_shape(shape: torch.Size, form: Form = "spatial") -> tuple[int, int]:
    if len(shape) < 4 or form == "pufferfish":
        return math.prod(shape[1:]), shape[0]
    n, m, k1, k2 = shape
    return m * k1, n * k2


def roll(matrix: Tensor, shape: torch.Size) -> Tensor:
    """Invert `unroll`: turn a matrix back into a weight of `shape`."""
    if matrix.shape[1] == shape[0]:
        return matrix.T.reshape(shape).contiguous()
    n, m, k1, k2 = shape
    return matrix.reshape(m, k1, n, k2).permute(2, 0, 1, 3).contiguous()


def split(left: Tensor, right: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Turn matrix factors (rows, r), (r, columns) into the two layers' weights u, v for a dense weight of `shape`.

    Convolution: u (r, m, k₁, 1), v (n, r, 1, k₂); in Pufferfish's form u (r, m, k₁, k₂), v (n, r, 1, 1).
    Conv1d: u (r, m, k), v (n, r, 1). Linear: u (r, m), v (n, r).
    """
    rank = left.shape[1]
    u, v = left.T, right.T
    if len(shape) == 4:
        n, m, k1, _ = shape
        u = u.reshape(rank, m, k1, -1)
        v = right.reshape(rank, n, 1, -1).permute(1, 0, 2, 3)
    elif len(shape) == 3:
        u, v = u.reshape(rank, *shape[1:]), v[:, :, None]
    # `contiguous()` would keep odd strides of axes of length 1, by which torch may choose another convolution kernel
    return u.clone(memory_format=torch.contiguous_format), v.clone(memory_format=torch.contiguous_format)


def join(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Invert `split`: turn the layers' weights back into matrix factors."""
    return u.flatten(1).T, v.transpose(0, 1).flatten(1)
