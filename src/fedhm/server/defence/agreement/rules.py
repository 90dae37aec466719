"""Robust rules that only ask for the inner products of a round's changes Dᵢ: centered clipping and multi-Krum.

Centered clipping (Karimireddy, He, Jaggi 2021) repeats, from v = 0,

    v ← v + (1/n) Σᵢ (Dᵢ − v) min(1, τ / ‖Dᵢ − v‖)

v stays in the span of the changes, v = Σⱼ cⱼ Dⱼ, so with λᵢ = min(1, τ / ‖Dᵢ − v‖) and their mean λ̄

    cⱼ ← (1 − λ̄) cⱼ + λⱼ / n    ‖Dᵢ − v‖² = Gᵢᵢ − 2 (G c)ᵢ + cᵀ G c

and the mean of changes that are n cⱼ times as long is v. A factor is above 1 where others were cut: their share goes to
those that agree. If nobody is further than τ from the mean, all factors are exactly 1.

Multi-Krum (Blanchard et al. 2017) gives a change the sum of its n − f − 2 smallest squared distances to others as its
score, with f of n hostile, and lets the n − f with the smallest scores pass.
"""

import torch
from torch import Tensor

ITERATIONS = 5


def centered_clip(gram: Tensor, tau: float) -> Tensor:
    """Return by how much each change is to be lengthened, (n,), so that their mean is that of centered clipping."""
    count = len(gram)
    weights = torch.zeros(count, dtype=torch.float64)
    for _ in range(ITERATIONS):
        squared = gram.diagonal() - 2 * gram @ weights + weights @ gram @ weights
        distances = squared.clamp(min=0.0).sqrt()
        kept = torch.where(distances > tau, tau / distances, 1.0)
        if bool((kept == 1.0).all()):  # v is the mean, whatever it was
            return torch.ones(count, dtype=torch.float64)
        weights = (1 - kept.mean()) * weights + kept / count
    return count * weights


def krum_scores(gram: Tensor, hostile: int) -> Tensor:
    """Return the score of every change, (n,); there must be at least 2 f + 3 of them."""
    count, squares = len(gram), gram.diagonal()
    distances = (squares[:, None] + squares - 2 * gram).clamp(min=0.0)
    others = distances[~torch.eye(count, dtype=torch.bool)].view(count, count - 1)
    return others.sort(1).values[:, : count - hostile - 2].sum(1)


def krum(gram: Tensor, hostile: int) -> list[int]:
    """Return which changes pass, in their order. Of too few to tell f hostile ones, as many count as can be told."""
    hostile = min(hostile, (len(gram) - 3) // 2)
    if hostile < 1:
        return list(range(len(gram)))
    order = krum_scores(gram, hostile).argsort(stable=True)
    return sorted(order[: len(gram) - hostile].tolist())
