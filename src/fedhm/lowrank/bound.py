"""How far from the best an approximation by subspace iteration can be.

Let Q hold k orthonormal left vectors, B = Qᵀ A with singular values sᵢ and right vectors V', and C = A − Q B what the
vectors leave of A. The approximation keeps the first r; its squared error is ‖A‖² − Σᵢ≤ᵣ sᵢ². The best one has
‖A‖² − Σᵢ≤ᵣ σᵢ², so the question is how large that sum can be. For any t it is

    Σᵢ≤ᵣ σᵢ² ≤ r t + tr (Aᵀ A − t)₊

In the basis (V', V'⊥), Aᵀ A = [S² + Eᵀ E, Eᵀ F; Fᵀ E, Fᵀ F] with E = C V' and F = C V'⊥. With φ ≥ ‖C‖₂ and t > φ² the
lower right block minus t is below −(t − φ²), and completing the square gives

    Σᵢ≤ᵣ σᵢ² ≤ r t + tr (S² − t + Eᵀ E t / (t − φ²))₊

The vectors come of Q = orthonormal A V, so C V = 0 and E = C (1 − V Vᵀ) V': Eᵀ E ≤ φ² (1 − Tᵀ T), T = Vᵀ V', the
angles between the bases before and after. Only φ is estimated: by Lanczos steps from a random vector, which come close
to the largest singular value from below, and a margin.
"""

import math

import torch
from torch import Tensor

from fedhm.lowrank.svd import squared_norm

TOLERANCE = 1.002  # times the smallest possible error; beyond it nobody asks how much
STEPS = 10
MARGIN = 1.07  # ten steps find 0.95 of the largest energy, or more, also where many are almost as large
ROUNDING = 1e-6  # of the energy of A: a smaller error cannot be told from none in float32


def worst_ratio(matrix: Tensor, rank: int, left: Tensor, spectrum: Tensor, angles: Tensor) -> float:
    """At most how many times the smallest possible error the first `rank` directions leave.

    left    (M, k) orthonormal: Q
    angles  (k, k): 1 − Tᵀ T
    """
    energies = spectrum.double().square()
    total = squared_norm(matrix)
    error = max(total - energies[:rank].sum().item(), ROUNDING * total)
    beyond = MARGIN * _largest_energy(matrix, left)
    if not math.isfinite(beyond):
        return math.inf
    excess = _excess(energies, rank, angles, beyond, (1 - TOLERANCE**-2) * error)
    return math.sqrt(error / (error - excess)) if excess < error else math.inf


def _excess(energies: Tensor, rank: int, angles: Tensor, beyond: float, enough: float) -> float:
    """How much larger than Σᵢ≤ᵣ sᵢ² the best sum can be; somewhat more or infinite, where that settles it."""
    kept = energies[:rank].sum()
    above = torch.tensor([1.01, 1.02, 1.04, 1.07, 1.1, 1.15, 1.25, 1.4, 1.7, 2, 3, 5, 10, 20, 50], dtype=torch.float64)
    levels = torch.cat([above * beyond, energies[rank - 1 : rank].clamp(min=1.01 * beyond)])
    growth = beyond * levels / (levels - beyond)
    sines = angles.diagonal().clamp(min=0)
    outset = rank * levels - kept
    # tr (D + G)₊ is at most tr D₊ + tr G, and at least the positive part of its diagonal
    most = outset + (energies - levels[:, None]).clamp(min=0).sum(1) + growth * sines.sum()
    if most.min() <= enough:
        return float(most.min())
    least = outset + (energies - levels[:, None] + growth[:, None] * sines).clamp(min=0).sum(1)
    best = int(least.argmin())
    if least[best] > enough:
        return math.inf
    block = torch.diag(energies - levels[best]) + growth[best] * angles
    return float(outset[best] + torch.linalg.eigvalsh(block).clamp(min=0).sum())


def _largest_energy(matrix: Tensor, left: Tensor) -> float:
    """‖A − Q Qᵀ A‖₂², nearly, by Lanczos steps."""
    vector = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(1), dtype=matrix.dtype)
    visited = torch.zeros(STEPS, len(vector), dtype=matrix.dtype)
    diagonal, beside = torch.zeros(STEPS, dtype=torch.float64), torch.zeros(STEPS, dtype=torch.float64)
    count = 0
    norm = vector.norm()
    while count < STEPS and norm > 1e-30:
        visited[count] = vector / norm
        image = matrix @ visited[count]
        image -= left @ (left.T @ image)
        vector = image @ matrix
        diagonal[count] = vector @ visited[count]
        count += 1
        for _ in range(2):  # once is not enough in float32
            vector -= (visited[:count] @ vector) @ visited[:count]
        norm = vector.norm()
        beside[count - 1] = norm
    if not count:
        return math.inf
    steps = torch.diag(diagonal[:count]) + torch.diag(beside[: count - 1], 1) + torch.diag(beside[: count - 1], -1)
    return float(torch.linalg.eigvalsh(steps)[-1])
