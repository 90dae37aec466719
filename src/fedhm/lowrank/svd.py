"""Truncated singular value decompositions: the spectral initialisation of the paper's factorized layers."""

from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """`left @ right` is the best approximation of rank r to a matrix (M, N).

    The singular values are split evenly, so that both factors start at the same scale.
    Smaller ranks are prefixes: `left[:, :r]`, `right[:r]`.
    """

    left: Tensor  # (M, r): U √Σ
    right: Tensor  # (r, N): √Σ Vᵀ
    spectrum: Tensor  # (min(M, N),): every singular value, the truncated ones too

    def prefix(self, rank: int) -> tuple[Tensor, Tensor]:
        return self.left[:, :rank], self.right[:rank]


def factorize(matrix: Tensor, rank: int) -> Factors:
    """Decomposes `matrix` (M, N) exactly and keeps its `rank` largest directions."""
    # half precision has no decomposition of its own
    precise = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    U, spectrum, Vt = torch.linalg.svd(precise, full_matrices=False)
    root = spectrum[:rank].sqrt()
    left, right = U[:, :rank] * root, root[:, None] * Vt[:rank]
    return Factors(left.to(matrix.dtype), right.to(matrix.dtype), spectrum)


def truncation_error(spectrum: Tensor, rank: int) -> float:
    """‖W − W_r‖_F, by Eckart–Young the norm of the singular values that were cut off."""
    return float(spectrum[rank:].norm())
