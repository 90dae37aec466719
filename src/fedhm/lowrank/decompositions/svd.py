"""Truncated singular value decompositions: the spectral initialisation of the paper's factorized layers.

A matrix is decomposed once, at the largest rank that anybody asks for: smaller ranks are prefixes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedhm.errors import FedhmError


class Factors(NamedTuple):
    """Factors of a matrix (M, N): `left @ right` is its best approximation of rank k, or as good as a bound says.

    The singular values are split evenly, so that both factors start at the same scale.
    Smaller ranks are prefixes: `left[:, :r]`, `right[:r]`.
    """

    left: Tensor  # (M, k): U √Σ
    right: Tensor  # (k, N): √Σ Vᵀ
    spectrum: Tensor  # the largest singular values: k of them, or all min(M, N)

    def prefix(self, rank: int) -> tuple[Tensor, Tensor]:
        return self.left[:, :rank], self.right[:rank]

    def cut(self, rank: int) -> "Factors":
        """Return the decomposition of the matrix without what is beyond `rank`, which can still be learnt.

        As in LoRA, one factor of such a direction is 0 and the other is not: with both at 0 it would never move.
        """
        right, spectrum = self.right.clone(), self.spectrum.clone()
        right[rank:], spectrum[rank:] = 0, 0
        return Factors(self.left, right, spectrum)


def factorize(matrix: Tensor, rank: int) -> Factors:
    """Decompose `matrix` (M, N) exactly, and keep its `rank` largest directions and all its singular values."""
    if not bool(matrix.isfinite().all()):  # LAPACK's result for these can be anything
        raise FedhmError("a weight matrix holds NaN or infinite values: the model has diverged; lower train.lr")
    # half precision has no decomposition of its own
    precise = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    U, spectrum, Vt = _through_gram(precise, rank) if precise.dtype == torch.float32 else _lapack(precise, rank)
    root = spectrum[:rank].sqrt()
    left, right = U * root, root[:, None] * Vt
    return Factors(left.to(matrix.dtype), right.to(matrix.dtype), spectrum)


def _lapack(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    U, spectrum, Vt = torch.linalg.svd(matrix, full_matrices=False)
    return U[:, :rank], spectrum, Vt[:rank]


def _through_gram(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose by the eigenvectors of the smaller Gram matrix, in twice the precision that the matrix has.

    Squaring costs half of the digits, and float64 has more than twice those of float32: the tail is as right as by an
    SVD in float32, at a fraction of the time for matrices that are not square, and a little less for square ones.
    """
    if matrix.shape[0] > matrix.shape[1]:
        V, spectrum, Ut = _through_gram(matrix.T, rank)
        return Ut.T, spectrum, V.T
    precise = matrix.double()
    energies, vectors = torch.linalg.eigh(precise @ precise.T)
    spectrum, U = energies.flip(0).clamp(min=0).sqrt(), vectors.flip(1)[:, :rank]
    scaled = U.T @ precise  # (rank, N): Σ Vᵀ
    # beyond the rank of the matrix there is no direction to find: the row stays zero
    norms = scaled.norm(dim=1, keepdim=True)
    Vt = torch.where(norms > spectrum[0] * 1e-14, scaled / norms, 0)
    return U.float(), spectrum.float(), Vt.float()


def truncation_error(spectrum: Tensor, rank: int) -> float:
    """Return ‖W − W_r‖_F, by Eckart–Young the norm of the singular values that were cut off."""
    return float(spectrum[rank:].norm())


def squared_norm(weight: Tensor) -> float:
    """Return ‖W‖²_F, precise enough to subtract from: rows are summed in float32, for speed, their sums in float64."""
    return float(torch.linalg.vector_norm(weight.flatten(1), dim=1).double().square().sum())
