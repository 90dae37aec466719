"""Decomposing a matrix that is not far from one whose decomposition is known: subspace iteration, checked by a bound.

One pass over A (M, N), with V (N, k) the known right singular vectors, k = r + some more than the rank that counts:

    Q = orthonormal A V    what the known directions have become
    B = Qᵀ A               its singular values and vectors are the new ones, found through the k×k matrix B Bᵀ

costs two products with A in place of a decomposition of it. `bound.py` says how far from the best rank-r approximation
the result can be. If that is too far, another pass starts from the result; after a few, the exact way is the shorter.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedhm.lowrank.decompositions.bound import TOLERANCE, worst_ratio
from fedhm.lowrank.decompositions.svd import Factors, factorize

PASSES = 3
SPARE = 64
SMALL = 256  # rows or columns; below, an exact decomposition is quick
WORTHWHILE = 0.6  # of the full rank; beyond it, an exact decomposition is not dearer
FALLING = 0.7  # a spectrum that falls so far within the spare directions has left the old ones behind


def spare(rank: int, full_rank: int) -> int:
    """Return how many directions to carry beyond `rank`: they make room between what is kept and what is cut off."""
    wanted = min(max(16, rank // 2), SPARE)
    return wanted if full_rank >= SMALL and rank + wanted <= WORTHWHILE * full_rank else 0


def decompose(matrix: Tensor, rank: int, known: Factors | None) -> tuple[Factors, bool]:
    """Decompose `matrix` at `rank` and some spare directions; also return whether that was done the exact way.

    known  a decomposition by this function, of a matrix not far from this one
    """
    count = rank + spare(rank, min(matrix.shape))
    if known is not None and count > rank and matrix.dtype == torch.float32:
        found = refactorize(matrix, rank, known)
        if found is not None:
            return found, False
    factors = factorize(matrix, count)
    return (factors._replace(spectrum=factors.spectrum[:count]) if count > rank else factors), True


def refactorize(matrix: Tensor, rank: int, known: Factors) -> Factors | None:
    """Decompose `matrix` at as many directions as `known` has, of which the first `rank` are within the tolerance.

    Return None if that cannot be said after some passes.
    """
    if not bool(known.spectrum[len(known.right) - 1] > 0):  # a singular value of 0 has no direction to start from
        return None
    basis = _start(known, rank, matrix)
    for _ in range(PASSES):
        found = _one_pass(matrix, basis)
        if found is None:
            return None
        if worst_ratio(matrix, rank, found.left, found.spectrum, found.turned) <= TOLERANCE:
            root = found.spectrum.sqrt().to(matrix.dtype)
            return Factors(found.left * root, root[:, None] * found.right, found.spectrum.to(matrix.dtype))
        basis = found.right
    return None


class Pass(NamedTuple):
    left: Tensor  # (M, k) orthonormal
    spectrum: Tensor  # (k,) in float64
    right: Tensor  # (k, N) orthonormal
    turned: Tensor  # (k, k): T = Vᵀ V', the cosines between the right vectors before and after


def _one_pass(matrix: Tensor, basis: Tensor) -> Pass | None:
    """Do one pass over `matrix`, from orthonormal right vectors (k, N) to the next; None if that fails."""
    X, L, unit = _nearly_orthonormal(matrix @ basis.T)
    B = unit @ (X.T @ matrix)
    inner = (B @ B.T).double()
    if not bool(inner.isfinite().all()):  # the exact way says what is wrong
        return None
    energies, rotation = torch.linalg.eigh(inner)
    energies, rotation = energies.flip(0), rotation.flip(1).to(X.dtype)
    if not bool(energies[-1] > 0):  # fewer directions than were asked for
        return None
    spectrum = energies.sqrt()
    scaled = rotation / spectrum.to(X.dtype)
    # T = Vᵀ V' = L scaled, since B V = Qᵀ A V = Lᵀ
    return Pass(X @ (unit.T @ rotation), spectrum, scaled.T @ B, L @ scaled)


def _nearly_orthonormal(Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (X, L, unit) with X unitᵀ = Q orthonormal and Q Lᵀ = Y.

    The columns come of singular vectors, so that they are almost orthogonal already: then X is Y with columns of
    length 1, and their Gram matrix gives the rest at half the time of a QR decomposition.
    """
    lengths = Y.norm(dim=0)
    X = Y / lengths
    lower, failed = torch.linalg.cholesky_ex(X.T @ X)
    one = torch.eye(Y.shape[1], dtype=Y.dtype)
    if failed or not bool(lower.diagonal().min() > 0.1):
        Q, R = torch.linalg.qr(Y)
        return Q, R.T, one
    return X, lengths[:, None] * lower, torch.linalg.solve_triangular(lower, one, upper=False)


def _start(known: Factors, rank: int, matrix: Tensor) -> Tensor:
    """Return the orthonormal right vectors (k, N) to start from."""
    spectrum = known.spectrum[: len(known.right)]
    basis = known.right / spectrum.sqrt()[:, None]
    if spectrum[-1] < 1e-3 * spectrum[0]:  # each was divided by its singular value, and so were its rounding errors
        basis = torch.linalg.qr(basis.T).Q.T
    if spectrum[-1] < FALLING * spectrum[rank - 1]:
        # What is cut off is new in every round: look for it in the matrix, rather than where it was.
        generator = torch.Generator().manual_seed(0)
        probes = torch.randn(len(basis) - rank, len(matrix), generator=generator, dtype=matrix.dtype)
        basis = torch.cat([basis[:rank], _beside(probes @ matrix, basis[:rank])])
    return basis


def _beside(rows: Tensor, kept: Tensor) -> Tensor:
    """Return orthonormal rows that span the part of `rows` orthogonal to `kept`."""
    for _ in range(2):  # twice, to be orthogonal to the last digit
        rows = rows - (rows @ kept.T) @ kept
    Q: Tensor = torch.linalg.qr(rows.T).Q
    return Q.T
