"""A sum of products of factors, Σ vₚ uₚ (n, rₚ)(rₚ, m): stacked, as long as that takes fewer numbers than the sum.

(v₁, v₂, …)(u₁; u₂; …)     has Σr · (n + m) numbers, and n · m once it is multiplied out
"""

import torch
from torch import Tensor

Stacked = tuple[Tensor] | tuple[Tensor, Tensor]  # the sum (n, m), or u (Σr, m) and v (n, Σr)


class Stack:
    """Products that are added one at a time, each times how much it counts; memory does not grow with their number."""

    def __init__(self, shape: torch.Size) -> None:
        self._shape = shape
        self._us: list[Tensor] = []
        self._vs: list[Tensor] = []
        self._rank = 0
        self._whole: Tensor | None = None

    def add(self, u: Tensor, v: Tensor, weight: float) -> None:
        u, v = u.float(), v.float()
        if self._whole is None and smaller_stacked(self._rank + len(u), self._shape):
            self._rank += len(u)
            self._us.append(u)
            self._vs.append(v * weight)
            return
        if self._whole is None:
            self._whole = multiplied(self.over(1.0)) if self._us else torch.zeros(self._shape)
            self._us, self._vs = [], []
        self._whole.addmm_(v, u, alpha=weight)

    def over(self, total: float) -> Stacked:
        """Return the sum of all products that were added, divided by a number."""
        if self._whole is not None:
            return (self._whole / total,)
        return torch.cat(self._us), torch.cat(self._vs, 1) / total


def smaller_stacked(rank: int, shape: torch.Size) -> bool:
    """Tell whether factors of so many directions take fewer numbers than their product."""
    return rank * sum(shape) < shape.numel()


def multiplied(stacked: Stacked) -> Tensor:
    return stacked[0] if len(stacked) == 1 else stacked[1] @ stacked[0]


def both(first: Stacked, second: Stacked) -> Stacked:
    """Return the sum of two."""
    if len(first) == 2 and len(second) == 2:
        shape = torch.Size((len(first[1]), first[0].shape[1]))
        if smaller_stacked(len(first[0]) + len(second[0]), shape):
            return torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]], 1)
    return (multiplied(first) + multiplied(second),)
