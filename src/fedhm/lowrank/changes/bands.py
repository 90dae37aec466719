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

import itertools
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
    """What all that have one rank made of the matrix that they were sent."""

    rank: int
    total: Tensor  # (M, N): the sum of what they have, each times its weight
    weight: float  # the sum of these
    sent: int = 0  # so many of the server's leading directions, at most `rank`, are in each and are no change


def directions(factors: Factors) -> Directions:
    """Return the directions of a decomposition. Those that it has lost, since they became 0, stay 0."""
    left, right = factors.left, factors.right
    tiny = torch.finfo(left.dtype).tiny
    return Directions(
        left / left.norm(dim=0, keepdim=True).clamp(min=tiny), right / right.norm(dim=1, keepdim=True).clamp(min=tiny)
    )


def mean_change(levels: Sequence[Level], factors: Factors, speed: float = 1.0) -> Tensor:
    """Return the mean of all changes (M, N), each band over those whose rank reaches it.

    speed  of what lies beyond a rank: 1 is that mean, 0 the one over everybody, to which those count who change nothing

    In the basis of the known directions, beyond_r drops the entries (i, j) with i < r or j < r. So what stays at (i, j)
    depends on the larger of the two alone: it is of G_b = Σ c_a H_{a+1} over the ranks r_a above that, with
    c_a = 1 / N_{a+1} − 1 / N_a. Every direction is multiplied with one matrix, and not with one for each rank:

        Σ_b c_b · beyond_{r_b}(H_{b+1}) = G_1 − L (X − C R) − Y R
        X_i = L_iᵀ G_b(i),    Y_j = G_b(j) R_jᵀ,    C_ij = L_iᵀ G_b(max(i, j)) R_jᵀ

    What was sent is subtracted by the same product with L: its mean over those who reach a direction is a share of it,
    as far as directions are orthogonal. Those of 16 bits are so to some digits, which is less than their rounding.
    """
    ordered = _one_for_each_rank(levels)
    sent = max(level.sent for level in levels)
    rank = ordered[1].rank if len(ordered) > 1 else 0  # the largest with something beyond it
    known = directions(Factors(*factors.prefix(max(rank, sent)), factors.spectrum))
    left, right = known.left, known.right[:rank]
    rows = left.new_zeros(left.shape[1], factors.right.shape[1])  # X − C R, and what was sent
    rows[:sent] = (_shares_sent(levels, sent, speed) * factors.left[:, :sent].norm(dim=0).double())[:, None]
    rows[:sent] *= factors.right[:sent]
    total, weight = ordered[0].total, ordered[0].weight
    if not rank:
        return torch.addmm(total / weight, left, rows, alpha=-1)
    columns, core = left.new_empty(len(left), rank), left.new_empty(rank, rank)  # Y, C
    mixed: Tensor | None = None  # G of the band
    so_far: Tensor | None = None  # the memory of the sum over those of larger ranks, once there are two
    for level, inner in zip(ordered[1:], [each.rank for each in ordered[2:]] + [0], strict=True):
        more = speed * (1 / weight - 1 / (weight + level.weight))
        mixed = total * more if mixed is None else mixed.add_(total, alpha=more)
        band, reached = slice(inner, level.rank), slice(0, level.rank)
        here = left[:, band].T @ mixed
        rows[band] += here
        columns[:, band] = mixed @ right[band].T
        core[band, reached] = here @ right[reached].T
        core[:inner, band] = left[:, :inner].T @ columns[:, band]
        total = so_far = total + level.total if so_far is None else so_far.add_(level.total)
        weight += level.weight
    assert mixed is not None  # there are two levels or more
    rows[:rank].addmm_(core, right, alpha=-1)
    mixed.add_(total, alpha=1 / weight)
    return mixed.addmm_(left, rows, alpha=-1).addmm_(columns, right, alpha=-1)


def _shares_sent(levels: Sequence[Level], count: int, speed: float) -> Tensor:
    """Return how much of each of so many directions is in the mean since it was sent.

    At full speed, it is the share of those who were sent it among those whose rank reaches it.
    """
    everybody = sum(level.weight for level in levels)
    shares = torch.zeros(count, dtype=torch.float64)
    edges = sorted({0, count, *(end for level in levels for end in (level.rank, level.sent) if end < count)})
    for start, end in itertools.pairwise(edges):  # all of these directions have the same clients
        reaching = sum(level.weight for level in levels if level.rank > start)
        counts = (1 - speed) / everybody + speed / reaching
        shares[start:end] = counts * sum(level.weight for level in levels if level.sent > start)
    return shares


def _one_for_each_rank(levels: Sequence[Level]) -> list[Level]:
    """Return the levels, those of one rank together, the largest rank first."""
    found: dict[int, Level] = {}
    for rank, total, weight, _ in levels:
        old = found.get(rank)
        found[rank] = Level(rank, old.total + total, old.weight + weight) if old else Level(rank, total, weight)
    return [found[rank] for rank in sorted(found, reverse=True)]
