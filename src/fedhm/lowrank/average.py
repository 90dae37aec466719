"""Means over clients of different ranks: of weights by bands, of adapters, and sums of products of factors."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedhm.errors import FedhmError
from fedhm.lowrank.svd import Factors


class SingularDirections(NamedTuple):
    """Singular vectors of a matrix, of length 1. Smaller ranks are prefixes."""

    left: Tensor  # (M, k)
    right: Tensor  # (k, N)


class RankLevel(NamedTuple):
    """The sum of the matrices of all clients of one rank."""

    rank: int
    total: Tensor  # (M, N): the weighted sum of the clients' matrices
    weight: float  # the sum of the clients' weights
    sent: int = 0  # how many leading directions the clients were sent, at most `rank`: they are not a change


def singular_directions(factors: Factors) -> SingularDirections:
    """Return the directions of a decomposition. A direction that became 0 stays 0."""
    return _with_lengths(factors)[0]


def _with_lengths(factors: Factors) -> tuple[SingularDirections, Tensor]:
    """Return the directions, and the lengths of the left factor's columns."""
    left, right = factors.left, factors.right
    tiny, lengths = torch.finfo(left.dtype).tiny, left.norm(dim=0)
    unit = SingularDirections(left / lengths.clamp(min=tiny), right / right.norm(dim=1, keepdim=True).clamp(min=tiny))
    return unit, lengths


def mean_by_bands(levels: Sequence[RankLevel], factors: Factors, speed: float = 1.0) -> Tensor:
    """Return the mean of all changes (M, N), where each band is averaged over the clients whose rank reaches it.

    With the leading r singular directions L_r (M, r), R_r (r, N) of a matrix W = L S R, a factorized layer of rank r
    changes by small steps within the tangent space at W_r. A change D (M, N) is projected onto it by

        T_r(D) = D − beyond_r(D),    beyond_r(D) = (1 − L_r L_rᵀ) D (1 − R_rᵀ R_r)

    For ranks r₁ < r₂ < … < r_K, of which the last may be full, D is the sum of its bands

        T_{r₁}(D),   T_{r₂}(D) − T_{r₁}(D),   …,   the rest of D in its own last band

    Each band is averaged over the clients whose rank reaches it. With H_b the sum of the changes of ranks r_b and
    above, and N_b the sum of their weights, that mean is

        H_1 / N_1  +  Σ_{b < K} (1 / N_{b+1} − 1 / N_b) · beyond_{r_b}(H_{b+1})

    This is the mean over all clients, plus a larger step beyond a rank, the fewer clients reach it.

    speed  of the step beyond a rank: 1 is this mean, 0 the mean over all clients, also those that cannot change it

    A part beyond one rank is beyond all smaller ranks too. So the sum over the bands starts at the largest rank, and
    every direction is multiplied with one matrix instead of one for each rank. With c_b = 1 / N_{b+1} − 1 / N_b and
    without[b] the projection that removes the directions between r_{b-1} and r_b on both sides,

        Σ_b c_b · beyond_{r_b}(H_{b+1}) = without[1](c_1 H_2 + without[2](c_2 H_3 + without[3](c_3 H_4 + …)))

    The matrix that was sent is subtracted by the same products: for orthogonal directions, its mean over the clients
    that reach a direction is a share of it. Directions in 16 bits are orthogonal to fewer digits; the error is smaller
    than their rounding.

    The totals are overwritten: fresh memory for (M, N) takes longer to get than a sum takes.
    """
    ordered = _one_for_each_rank(levels)
    sent = max(level.sent for level in levels)
    rank = ordered[1].rank if len(ordered) > 1 else 0  # the largest rank that has a part beyond it
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
    """Remove orthonormal directions from a matrix, on the left and on the right, and subtract `left @ also`."""
    rows = left.T @ matrix
    columns = (matrix @ right.T).addmm_(left, rows @ right.T, alpha=-1)  # of the matrix without `left`
    matrix.addmm_(left, rows.add_(also), alpha=-1).addmm_(columns, right, alpha=-1)


def _shares_sent(levels: Sequence[RankLevel], count: int, speed: float) -> Tensor:
    """Return, for each of `count` directions, the share of it in the mean that is there because it was sent.

    At full speed it is the share of the clients that were sent the direction, among those whose rank reaches it.
    """
    everyone = sum(level.weight for level in levels)
    shares = torch.zeros(count, dtype=torch.float64)
    edges = sorted({0, count, *(end for level in levels for end in (level.rank, level.sent) if end < count)})
    for start, end in itertools.pairwise(edges):  # the same clients have all of these directions
        reaching = sum(level.weight for level in levels if level.rank > start)
        counts = (1 - speed) / everyone + speed / reaching
        shares[start:end] = counts * sum(level.weight for level in levels if level.sent > start)
    return shares


def _one_for_each_rank(levels: Sequence[RankLevel]) -> list[RankLevel]:
    """Return one level for each rank, the largest rank first."""
    found: dict[int, RankLevel] = {}
    for rank, total, weight, _ in levels:
        old = found.get(rank)
        found[rank] = (
            RankLevel(rank, old.total.add_(total), old.weight + weight) if old else RankLevel(rank, total, weight)
        )
    return [found[rank] for rank in sorted(found, reverse=True)]


Aggregate = Literal["models", "updates", "bands"]  # how FedHM averages models of different ranks
AdapterAggregate = Literal[Aggregate, "partitions"]  # how adapters are averaged
LENGTH = 1 / math.sqrt(3)  # the norm of a row of A, as peft draws it


@dataclass
class AdapterSum:
    """The weighted sum of the adapters of all clients of one rank, for a weight of shape (m, n).

    It is a stack of factors as long as that is smaller than their product. So memory does not grow with the number of
    clients.
    """

    rank: int
    shape: tuple[int, int]
    sent: int  # how many leading directions of the server's factors are part of the returned adapters
    weight: float = 0.0
    lefts: list[Tensor] = field(default_factory=list)
    rights: list[Tensor] = field(default_factory=list)
    whole: Tensor | None = None  # the sum, once it is smaller than the stack

    @property
    def columns(self) -> int:
        return sum(left.shape[1] for left in self.lefts)

    def add(self, left: Tensor, right: Tensor, weight: float) -> None:
        self.weight += weight
        if self.whole is not None:
            self.whole.addmm_(left.float(), right.float(), alpha=weight)
            return
        self.lefts.append(left.float() * weight)
        self.rights.append(right.float())
        if 2 * self.columns > min(self.shape):
            self.whole = torch.cat(self.lefts, 1) @ torch.cat(self.rights)
            self.lefts, self.rights = [], []


def merge_adapters(
    levels: Sequence[AdapterSum], old: Factors, aggregate: AdapterAggregate, speed: float = 1.0
) -> Factors:
    """Return the server's adapter after a round, with as many directions as before and all singular values.

    models      Σ αₚ Lₚ Rₚ / Σ αₚ
    updates     old + Σ αₚ (Lₚ Rₚ − sentₚ) / Σ αₚ
    bands       the same, but each band is averaged over the clients whose rank reaches it (`mean_by_bands`); a `speed`
                below 1 is between that mean and the mean over all clients
    partitions  the sum over the parts of the factors between two ranks, each the mean over the clients that have it: a
                level is such a part here, and its weight is that of all clients whose rank reaches it

    The adapters are not recovered. Client p has added Lₚ Rₚ (m, rₚ)(rₚ, n) to a weight. The columns of all adapters,
    and of the server's, lie in the span of the stacked left factors. In an orthonormal basis of it, from one QR
    decomposition, every matrix is one of Σr × n. The mean is made there, by the rules that FedHM has for weights. It is
    decomposed through a Gram matrix of Σr × Σr. If Σr is below m and n, no matrix of m × n is formed.
    """
    levels = [level for level in levels if level.weight > 0]
    if not levels:
        return old
    rank, columns = old.left.shape[1], sum(level.columns for level in levels)
    changes = aggregate in ("updates", "bands")
    stacked = columns + rank if changes or columns < rank else columns
    if any(level.whole is not None for level in levels) or stacked > min(levels[0].shape):
        totals = [_recovered(level) for level in levels]
        return _decomposed(_mean(levels, totals, old.left, old.right, aggregate, speed), rank)
    lefts = [left for level in levels for left in level.lefts]
    reflectors, tau = torch.geqrf(torch.cat([*lefts, old.left] if stacked > columns else lefts, 1))
    r = reflectors[:stacked].triu()
    totals, before = [], 0
    for level in levels:
        after = before + level.columns
        totals.append(r[:, before:after] @ torch.cat(level.rights))
        before = after
    inside = _decomposed(_mean(levels, totals, r[:, columns:], old.right, aggregate, speed), rank)
    left = inside.left.new_zeros(levels[0].shape[0], rank)
    left[:stacked] = inside.left
    return inside._replace(left=torch.ormqr(reflectors, tau, left))


def _mean(
    levels: Sequence[AdapterSum],
    totals: Sequence[Tensor],
    left: Tensor,
    right: Tensor,
    how: AdapterAggregate,
    speed: float,
) -> Tensor:
    weight = sum(level.weight for level in levels)
    if how == "models":
        return sum(totals[1:], totals[0]) / weight
    if how == "partitions":
        means = [total / level.weight for level, total in zip(levels, totals, strict=True)]
        return sum(means[1:], means[0])
    pairs = list(zip(levels, totals, strict=True))
    if how == "bands":
        whole = [RankLevel(level.rank, total, level.weight, level.sent) for level, total in pairs]
        step = mean_by_bands(whole, Factors(left, right, right[:, 0]), speed)
    else:
        changes = [
            torch.addmm(total, left[:, : level.sent], right[: level.sent], alpha=-level.weight)
            for level, total in pairs
        ]
        step = sum(changes[1:], changes[0]) / weight
    return torch.addmm(step, left, right)


def _decomposed(matrix: Tensor, rank: int) -> Factors:
    """Return the leading directions of a matrix. If it has fewer, one factor of the others is 0 and can be learnt.

    The eigenvectors of the Gram matrix, in twice the precision, take half of the time of an SVD.
    """
    if not bool(matrix.isfinite().all()):  # LAPACK's result for these can be anything
        raise FedhmError("the mean of the adapters holds NaN or infinite values: training has diverged; lower train.lr")
    if matrix.shape[0] > matrix.shape[1]:
        U, spectrum, Vt = torch.linalg.svd(matrix, full_matrices=False)
        return Factors(U[:, :rank] * LENGTH, spectrum[:rank, None] * Vt[:rank] / LENGTH, spectrum)
    precise = matrix.double()
    energies, vectors = torch.linalg.eigh(precise @ precise.T)
    leading = vectors.flip(1)[:, :rank].float()
    spectrum = energies.flip(0).clamp(min=0).sqrt().float()
    return Factors(leading * LENGTH, leading.T @ matrix / LENGTH, spectrum)


def _recovered(level: AdapterSum) -> Tensor:
    return torch.cat(level.lefts, 1) @ torch.cat(level.rights) if level.whole is None else level.whole


def initial_adapter(shape: tuple[int, int], rank: int, generator: torch.Generator) -> Factors:
    """Return the factors with which an adapter of shape (m, n) begins: orthogonal rows of A, and B = 0."""
    drawn, _ = torch.linalg.qr(torch.randn(shape[0], rank, generator=generator))
    return Factors(drawn * LENGTH, torch.zeros(rank, shape[1]), torch.zeros(rank))


StackedProducts = tuple[Tensor] | tuple[Tensor, Tensor]  # the sum (n, m), or stacked u (Σr, m) and v (n, Σr)


class ProductSum:
    """A weighted sum of products of factors, Σ vₚ uₚ (n, rₚ)(rₚ, m), to which products are added one at a time.

    The factors are stacked, (v₁, v₂, …)(u₁; u₂; …), as long as their Σr · (n + m) numbers are fewer than the n · m of
    the sum. So memory does not grow with the number of products.
    """

    def __init__(self, shape: torch.Size) -> None:
        self._shape = shape
        self._us: list[Tensor] = []
        self._vs: list[Tensor] = []
        self._rank = 0
        self._whole: Tensor | None = None

    def add(self, u: Tensor, v: Tensor, weight: float) -> None:
        u, v = u.float(), v.float()
        if self._whole is None and stacking_is_smaller(self._rank + len(u), self._shape):
            self._rank += len(u)
            self._us.append(u)
            self._vs.append(v * weight)
            return
        if self._whole is None:
            self._whole = multiply_out(self.over(1.0)) if self._us else torch.zeros(self._shape)
            self._us, self._vs = [], []
        self._whole.addmm_(v, u, alpha=weight)

    def over(self, total: float) -> StackedProducts:
        """Return the sum of all products divided by `total`."""
        if self._whole is not None:
            return (self._whole / total,)
        return torch.cat(self._us), torch.cat(self._vs, 1) / total


def stacking_is_smaller(rank: int, shape: torch.Size) -> bool:
    """Tell whether factors of this rank have fewer numbers than their product."""
    return rank * sum(shape) < shape.numel()


def multiply_out(stacked: StackedProducts) -> Tensor:
    return stacked[0] if len(stacked) == 1 else stacked[1] @ stacked[0]


def add_stacked(first: StackedProducts, second: StackedProducts) -> StackedProducts:
    """Return the sum of two sums of products."""
    if len(first) == 2 and len(second) == 2:
        shape = torch.Size((len(first[1]), first[0].shape[1]))
        if stacking_is_smaller(len(first[0]) + len(second[0]), shape):
            return torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]], 1)
    return (multiply_out(first) + multiply_out(second),)
