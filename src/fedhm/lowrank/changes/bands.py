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
    return _with_lengths(factors)[0]


def _with_lengths(factors: Factors) -> tuple[Directions, Tensor]:
    """Return the directions, and the lengths of the left factor's columns."""
    left, right = factors.left, factors.right
    tiny, lengths = torch.finfo(left.dtype).tiny, left.norm(dim=0)
    unit = Directions(left / lengths.clamp(min=tiny), right / right.norm(dim=1, keepdim=True).clamp(min=tiny))
    return unit, lengths


def mean_change(levels: Sequence[Level], factors: Factors, speed: float = 1.0) -> Tensor:
    """Return the mean of all changes (M, N), each band over those whose rank reaches it. The totals are used up by it.

    speed  of what lies beyond a rank: 1 is that mean, 0 the one over everybody, to which those count who change nothing

    Since what lies beyond a rank lies beyond all smaller ones, the sum over the bands is made from the largest rank on,
    and every direction is multiplied with one matrix, and not with one for each rank. With c_b = 1 / N_{b+1} − 1 / N_b
    and without[b] the projection that removes the directions between r_{b-1} and r_b on both sides,

        Σ_b c_b · beyond_{r_b}(H_{b+1}) = without[1](c_1 H_2 + without[2](c_2 H_3 + without[3](c_3 H_4 + …)))

    What was sent is subtracted by the same products: its mean over those who reach a direction is a share of it, as far
    as directions are orthogonal. Those of 16 bits are so to some digits, which is less than their rounding.

    Matrices (M, N) are summed in the memory of the totals: fresh memory takes longer to get than a sum to make.
    """
    ordered = _one_for_each_rank(levels)
    sent = max(level.sent for level in levels)
    rank = ordered[1].rank if len(ordered) > 1 else 0  # the largest with something beyond it
    known, lengths = _with_lengths(Factors(*factors.prefix(max(rank, sent)), factors.spectrum))
    shares = torch.zeros_like(lengths)
    shares[:sent] = _shares_sent(levels, sent, speed)
    taken = (shares * lengths)[:, None] * factors.right[: len(lengths)]  # known.left @ taken: sent, and in the mean
    total, weight = ordered[0].total, ordered[0].weight
    beyond: Tensor | None = None
    edges = [level.rank for level in ordered[1:]] + [0]
    for level, inner in zip(ordered[1:], edges[1:], strict=True):
        more = speed * (1 / weight - 1 / (weight + level.weight))
        reaching, total = total, level.total.add_(total)
        weight += level.weight
        beyond = reaching.mul_(more) if beyond is None else beyond.add_(reaching, alpha=more)
        band = slice(inner, level.rank)
        _remove(beyond, known.left[:, band], known.right[band], taken[band])
    mean = total.div_(weight) if beyond is None else beyond.add_(total, alpha=1 / weight)
    return mean.addmm_(known.left[:, rank:], taken[rank:], alpha=-1) if sent > rank else mean


def _remove(matrix: Tensor, left: Tensor, right: Tensor, also: Tensor) -> None:
    """Remove orthonormal directions from a matrix, on the left and on the right; then subtract `left @ also`."""
    rows = left.T @ matrix
    columns = (matrix @ right.T).addmm_(left, rows @ right.T, alpha=-1)  # of what has no `left` any more
    matrix.addmm_(left, rows.add_(also), alpha=-1).addmm_(columns, right, alpha=-1)


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
        found[rank] = Level(rank, old.total.add_(total), old.weight + weight) if old else Level(rank, total, weight)
    return [found[rank] for rank in sorted(found, reverse=True)]
