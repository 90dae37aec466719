"""A bound on how far from the best an approximation by subspace iteration can be.

Let Q hold k orthonormal left vectors, B = Qᵀ A with singular values sᵢ and right vectors V', and C = A − Q B what the
vectors leave of A. The approximation keeps the first r; its squared error is ‖A‖² − Σᵢ≤ᵣ sᵢ². The best one has
‖A‖² − Σᵢ≤ᵣ σᵢ², so the question is how large that sum can be. For any t it is

    Σᵢ≤ᵣ σᵢ² ≤ r t + tr (Aᵀ A − t)₊

In the basis (V', V'⊥), Aᵀ A = [S² + Eᵀ E, Eᵀ F; Fᵀ E, Fᵀ F] with E = C V' and F = C V'⊥. With φ ≥ ‖C‖₂ and t > φ² the
lower right block minus t is below −(t − φ²), and completing the square gives

    Σᵢ≤ᵣ σᵢ² ≤ r t + tr (S² − t + Eᵀ E t / (t − φ²))₊

The vectors come of Q = orthonormal A V, so C V = 0 and E = C (1 − V Vᵀ) V': Eᵀ E ≤ φ² (1 − Tᵀ T), T = Vᵀ V', the
angles between the bases before and after. Only φ is estimated: by Lanczos steps from a random vector, which come close
to the largest singular value from below, and a margin. A few steps and a wide margin often do.
"""

import math

import torch
from torch import Tensor

from fedhm.lowrank.decompositions.svd import squared_norm

TOLERANCE = 1.002  # times the smallest possible error; how far beyond it an error is does not matter
ESTIMATES = ((5, 1.4), (10, 1.07))  # steps, and the margin on the energy: five find 0.8 of it or more, ten 0.95,
# also where many are almost as large
NOISE = 1e-7  # of the largest energy: what is found below it is rounding
ROUNDING = 1e-6  # of the energy of A: a smaller error cannot be told from none in float32


def worst_ratio(matrix: Tensor, rank: int, left: Tensor, spectrum: Tensor, turned: Tensor) -> float:
    """Bound the error that the first `rank` directions leave, as a multiple of the smallest possible error.

    left    (M, k) orthonormal: Q
    turned  (k, k): T
    """
    energies = spectrum.double().square()
    total = squared_norm(matrix)
    error = max(total - energies[:rank].sum().item(), ROUNDING * total)
    enough = (1 - TOLERANCE**-2) * error
    excess = math.inf
    lanczos = _Lanczos(matrix, left)
    for steps, margin in ESTIMATES:
        found = lanczos.largest_energy(steps)
        if not math.isfinite(found):
            break
        beyond = max(margin * found, NOISE * float(energies[0]))
        excess = _excess(energies, rank, turned, beyond, enough)
        if excess <= enough:
            break
    return math.sqrt(error / (error - excess)) if excess < error else math.inf


def _excess(energies: Tensor, rank: int, turned: Tensor, beyond: float, enough: float) -> float:
    """Bound how much larger than Σᵢ≤ᵣ sᵢ² the best sum can be; somewhat more or infinite, where that settles it."""
    kept = energies[:rank].sum()
    above = torch.tensor([1.01, 1.02, 1.04, 1.07, 1.1, 1.15, 1.25, 1.4, 1.7, 2, 3, 5, 10, 20, 50], dtype=torch.float64)
    levels = torch.cat([above * beyond, energies[rank - 1 : rank].clamp(min=1.01 * beyond)])
    growth = beyond * levels / (levels - beyond)
    sines = (1 - turned.double().square().sum(0)).clamp(min=0)
    outset = rank * levels - kept
    # G ≤ 2 (G of the kept directions ⊕ G of the spare ones), and angles ≤ 1: an upper bound that takes only sums
    room = energies - levels[:, None]
    kept_part = room[:, :rank].clamp(min=0).sum(1) + 2 * growth * sines[:rank].sum()
    most = outset + kept_part + (room[:, rank:] + 2 * growth[:, None]).clamp(min=0).sum(1)
    most = torch.minimum(most, outset + room.clamp(min=0).sum(1) + growth * sines.sum())
    if most.min() <= enough:
        return float(most.min())
    least = outset + (room + growth[:, None] * sines).clamp(min=0).sum(1)  # the diagonal alone
    best = int(least.argmin())
    if least[best] > enough:
        return math.inf
    angles = torch.eye(len(energies), dtype=torch.float64) - (turned.T @ turned).double()
    block = torch.diag(energies - levels[best]) + growth[best] * angles
    return float(outset[best] + torch.linalg.eigvalsh(block).clamp(min=0).sum())


class _Lanczos:
    """An estimate of ‖A − Q Qᵀ A‖₂² that comes closer with every step."""

    def __init__(self, matrix: Tensor, left: Tensor) -> None:
        self._matrix, self._left = matrix, left
        self._next = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(1), dtype=matrix.dtype)
        self._visited = matrix.new_empty(0, matrix.shape[1])
        self._diagonal: list[float] = []
        self._beside: list[float] = []

    def largest_energy(self, steps: int) -> float:
        """Return the estimate after `steps` steps, those of earlier calls included."""
        while len(self._diagonal) < steps and (norm := float(self._next.norm())) > 1e-30:
            if self._diagonal:
                self._beside.append(norm)
            here = self._next / norm
            self._visited = torch.cat([self._visited, here[None]])
            image = self._matrix @ here
            image -= self._left @ (self._left.T @ image)
            vector = image @ self._matrix
            self._diagonal.append(float(vector @ here))
            for _ in range(2):  # once is not enough in float32
                vector -= (self._visited @ vector) @ self._visited
            self._next = vector
        beside = torch.diag(torch.tensor(self._beside, dtype=torch.float64), 1)
        steps_so_far = torch.diag(torch.tensor(self._diagonal, dtype=torch.float64)) + beside + beside.T
        return float(torch.linalg.eigvalsh(steps_so_far)[-1]) if bool(steps_so_far.isfinite().all()) else math.inf
