"""The mean of adapters of different ranks, and its best approximation of lower rank, without recovering any of them.

Client p has added Lₚ Rₚ (m, rₚ)(rₚ, n) to a weight. The columns of all of these, and of what the server had, lie in the
span of the stacked left factors: with an orthonormal basis of it, from one QR decomposition, every matrix is one of
Σr × n. There the mean is made, by the very rules that FedHM has for weights, and decomposed by way of a Gram matrix of
Σr × Σr: where Σr is below m and n, nothing of m × n is formed.

Where so many clients take part that the stack would be the larger one, their sum is kept instead, so that memory does
not grow with their number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedhm.errors import FedhmError
from fedhm.lowrank.changes.bands import Level, mean_change
from fedhm.lowrank.decompositions.svd import Factors

Aggregate = Literal["models", "updates", "bands", "partitions"]
LENGTH = 1 / math.sqrt(3)  # of a row of A, as peft draws it


@dataclass
class Added:
    """What the clients of one rank have added to a weight of shape (m, n), each times how much it counts."""

    rank: int
    shape: tuple[int, int]
    sent: int  # how many leading directions of the server's factors they were sent, and have in what they return
    weight: float = 0.0
    lefts: list[Tensor] = field(default_factory=list)
    rights: list[Tensor] = field(default_factory=list)
    whole: Tensor | None = None  # their sum, once it is the smaller one

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


def merged(levels: Sequence[Added], old: Factors, aggregate: Aggregate, speed: float = 1.0) -> Factors:
    """Return what the server has after a round, at as many directions as before, and all its singular values.

    models      Σ αₚ Lₚ Rₚ / Σ αₚ
    updates     old + Σ αₚ (Lₚ Rₚ − sentₚ) / Σ αₚ
    bands       the same, each band of a change over those whose rank reaches it (`lowrank/changes/bands.py`), or at a
                `speed` below 1 between that mean and the one over everybody
    partitions  Σ over the parts of the factors between two ranks, each the mean over those who have it: a level is such
                a part here, and its weight that of all whose rank reaches it
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
    levels: Sequence[Added], totals: Sequence[Tensor], left: Tensor, right: Tensor, how: Aggregate, speed: float
) -> Tensor:
    weight = sum(level.weight for level in levels)
    if how == "models":
        return sum(totals[1:], totals[0]) / weight
    if how == "partitions":
        means = [total / level.weight for level, total in zip(levels, totals, strict=True)]
        return sum(means[1:], means[0])
    pairs = list(zip(levels, totals, strict=True))
    if how == "bands":
        whole = [Level(level.rank, total, level.weight, level.sent) for level, total in pairs]
        step = mean_change(whole, Factors(left, right, right[:, 0]), speed)
    else:
        changes = [
            torch.addmm(total, left[:, : level.sent], right[: level.sent], alpha=-level.weight)
            for level, total in pairs
        ]
        step = sum(changes[1:], changes[0]) / weight
    return torch.addmm(step, left, right)


def _decomposed(matrix: Tensor, rank: int) -> Factors:
    """Return the leading directions of a matrix: of those that it does not have, one factor is 0 and can be learnt.

    By the eigenvectors of its Gram matrix, in twice its precision, which takes half of the time of an SVD.
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


def _recovered(level: Added) -> Tensor:
    return torch.cat(level.lefts, 1) @ torch.cat(level.rights) if level.whole is None else level.whole


def fresh(shape: tuple[int, int], rank: int, generator: torch.Generator) -> Factors:
    """Return factors of a zero matrix (m, n) that can be learnt, as adapters begin: orthogonal rows of A, and B = 0."""
    drawn, _ = torch.linalg.qr(torch.randn(shape[0], rank, generator=generator))
    return Factors(drawn * LENGTH, torch.zeros(rank, shape[1]), torch.zeros(rank))
