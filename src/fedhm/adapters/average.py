"""The mean of adapters of different ranks, and its best approximation of lower rank, without recovering any of them.

Client p has added Lₚ Rₚ (m, rₚ)(rₚ, n) to a weight. All of these, and what the server had, lie in the span of the
stacked factors: with orthonormal bases of it, from two QR decompositions, every matrix is one of Σr × Σr. There the
mean is made, by the very rules that FedHM has for weights, and decomposed: where Σr is below m and n, nothing of m × n
is formed.

Where so many clients take part that the stack would be the larger one, their sum is kept instead, so that memory does
not grow with their number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedhm.lowrank.bands import Level, directions, faster
from fedhm.lowrank.svd import Factors

Aggregate = Literal["models", "updates", "bands"]
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


def merged(levels: Sequence[Added], old: Factors, aggregate: Aggregate) -> Factors:
    """Return what the server has after a round, at as many directions as before, and all its singular values.

    models   Σ αₚ Lₚ Rₚ / Σ αₚ
    updates  old + Σ αₚ (Lₚ Rₚ − sentₚ) / Σ αₚ
    bands    the same, each band of a change over those whose rank reaches it (`lowrank/bands.py`)
    """
    levels = [level for level in levels if level.weight > 0]
    if not levels:
        return old
    stacked = sum(level.columns for level in levels) + old.left.shape[1]
    dense = any(level.whole is not None for level in levels) or stacked > min(levels[0].shape)
    if dense:
        totals = [_recovered(level) for level in levels]
        return _decomposed(_mean(levels, totals, old.left, old.right, aggregate), old)
    left, r = torch.linalg.qr(torch.cat([*(t for level in levels for t in level.lefts), old.left], 1))
    right, s = torch.linalg.qr(torch.cat([*(t for level in levels for t in level.rights), old.right]).T)
    totals, before = [], 0
    for level in levels:
        after = before + level.columns
        totals.append(r[:, before:after] @ s[:, before:after].T)
        before = after
    inside = _decomposed(_mean(levels, totals, r[:, before:], s[:, before:].T, aggregate), old)
    return Factors(left @ inside.left, inside.right @ right.T, inside.spectrum)


def _mean(levels: Sequence[Added], totals: Sequence[Tensor], left: Tensor, right: Tensor, how: Aggregate) -> Tensor:
    weight = sum(level.weight for level in levels)
    if how == "models":
        return sum(totals[1:], totals[0]) / weight
    changes = [
        Level(
            level.rank,
            torch.addmm(total, left[:, : level.sent], right[: level.sent], alpha=-level.weight),
            level.weight,
        )
        for level, total in zip(levels, totals, strict=True)
    ]
    step = sum((change.total for change in changes[1:]), changes[0].total) / weight
    if how == "bands" and len(changes) > 1:
        known = directions(Factors(left, right, right[:, 0]))
        more = faster(changes, known)
        step = step if more is None else step + more
    return torch.addmm(step, left, right)


def _decomposed(matrix: Tensor, old: Factors) -> Factors:
    """Return the leading directions of a matrix: of those that it does not have, one factor is 0 and can be learnt."""
    U, spectrum, Vt = torch.linalg.svd(matrix, full_matrices=False)
    rank = old.left.shape[1]
    return Factors(U[:, :rank] * LENGTH, spectrum[:rank, None] * Vt[:rank] / LENGTH, spectrum)


def _recovered(level: Added) -> Tensor:
    return torch.cat(level.lefts, 1) @ torch.cat(level.rights) if level.whole is None else level.whole


def fresh(shape: tuple[int, int], rank: int, generator: torch.Generator) -> Factors:
    """Return factors of a zero matrix (m, n) that can be learnt, as adapters begin: orthogonal rows of A, and B = 0."""
    drawn, _ = torch.linalg.qr(torch.randn(shape[0], rank, generator=generator))
    return Factors(drawn * LENGTH, torch.zeros(rank, shape[1]), torch.zeros(rank))
