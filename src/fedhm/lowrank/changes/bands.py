"""Bands of a change: what a network of low rank can make of it, and what only those of larger rank can.

With the leading r singular directions L_r (M, r), R_r (r, N) of a matrix W = L S R, the changes that a factorized layer
of rank r makes by small steps are those of the tangent space at W_r, onto which a change D (M, N) is projected by

    T_r(D) = D − beyond_r(D),    beyond_r(D) = (1 − L_r L_rᵀ) D (1 − R_rᵀ R_r)

For ranks r₁ < r₂ < … < r_K, of which the last may be full, D is the sum of its bands

    T_{r₁}(D),   T_{r₂}(D) − T_{r₁}(D),   …,   what is left in D's own last band

Each is to be averaged over those whose rank reaches it. With H_b the sum of the changes of ranks r_b and above, N_b the
sum of their weights, that mean is

    H_1 / N_1  +  Σ_{b < K} (1 / N_{b+1} − 1 / N_b) · beyond_{r_b}(H_{b+1})

the mean over everybody, and whatever lies beyond a rank as much faster as fewer can make it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedhm.lowrank.decompositions.svd import Factors


class Directions(NamedTuple):
    """Singular directions of a matrix, of length 1; smaller ranks are prefixes."""

    left: Tensor  # (M, k)
    right: Tensor  # (k, N)


class Level(NamedTuple):
    """The changes of all that have one rank."""

    rank: int
    total: Tensor  # (M, N): the sum of their changes, each times its weight
    weight: float  # the sum of these


def directions(factors: Factors) -> Directions:
    """Return the directions of a decomposition. Those that it has lost, since they became 0, stay 0."""
    left, right = factors.left, factors.right
    tiny = torch.finfo(left.dtype).tiny
    return Directions(
        left / left.norm(dim=0, keepdim=True).clamp(min=tiny), right / right.norm(dim=1, keepdim=True).clamp(min=tiny)
    )


def beyond(change: Tensor, known: Directions, rank: int) -> Tensor:
    """Return the part of `change` (M, N) that no small step of rank `rank` can make."""
    left, right = known.left[:, :rank], known.right[:rank]
    rest = torch.addmm(change, left, left.T @ change, alpha=-1)
    return rest.addmm_(rest @ right.T, right, alpha=-1)


def faster(levels: Sequence[Level], known: Directions) -> Tensor | None:
    """Return what the mean over the bands has more than the mean over everybody; None if that is nothing."""
    ordered = _one_for_each_rank(levels)
    found: Tensor | None = None
    total, weight = ordered[0].total, ordered[0].weight
    for level in ordered[1:]:
        more = 1 / weight - 1 / (weight + level.weight)
        part = beyond(total, known, level.rank).mul_(more)
        found = part if found is None else found.add_(part)
        total, weight = total + level.total, weight + level.weight
    return found


def _one_for_each_rank(levels: Sequence[Level]) -> list[Level]:
    """Return the levels, those of one rank together, the largest rank first."""
    found: dict[int, Level] = {}
    for rank, total, weight in levels:
        old = found.get(rank)
        found[rank] = Level(rank, old.total + total, old.weight + weight) if old else Level(rank, total, weight)
    return [found[rank] for rank in sorted(found, reverse=True)]
