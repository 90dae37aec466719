"""Coordinate-wise rules in place of the mean (Yin et al. 2018): the trimmed mean and the median of every number.

They need all contributions at once: what clients of a tier sent is held until the round's end, recovered to full shape.
Of fewer than three contributions no number can be told to be wrong, and the mean is all there is. Clients count alike.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedhm.config.sections.method_config import MethodConfig
from fedhm.config.sections.training import ServerConfig
from fedhm.errors import FedhmError
from fedhm.methods.mean import MakeMean, WeightedMean
from fedhm.networks.exchange import Tensors
from fedhm.networks.precision import precise

Rule = Literal["trimmed-mean", "median"]
FEWEST = 3


@dataclass
class _Given:
    """What was contributed to one tensor."""

    tensors: list[Tensor] = field(default_factory=list)
    rows: list[Tensor | None] = field(default_factory=list)  # masks of the rows that count
    weights: list[float] = field(default_factory=list)
    unrolled: bool = False  # they are products of factors; one tier has all of a weight so, or none


class CoordinateMean(WeightedMean):
    """As the weighted mean, whose sums are those of the coordinate-wise rule times all weights together."""

    def __init__(self, old: Tensors, rule: Rule, trim: float) -> None:
        super().__init__(old)
        self._rule, self._trim = rule, trim
        self._given: dict[str, _Given] = {}

    def add(self, name: str, tensor: Tensor, weight: float, rows: Tensor | None = None) -> None:
        self._give(name, precise(tensor), weight, rows)

    def add_product(self, name: str, left: Tensor, right: Tensor, weight: float) -> None:
        self._give(name, precise(left) @ precise(right), weight)
        self._given[name].unrolled = True

    def _give(self, name: str, tensor: Tensor, weight: float, rows: Tensor | None = None) -> None:
        given = self._given.setdefault(name, _Given())
        given.tensors.append(tensor)
        given.weights.append(weight)
        given.rows.append(rows)

    def absorb(self, other: WeightedMean, but: Set[str] = frozenset()) -> None:
        if isinstance(other, CoordinateMean):
            other.settle()
        super().absorb(other, but)

    def take(self, name: str) -> Tensor:
        self.settle()
        return super().take(name)

    def result(self) -> Tensors:
        self.settle()
        return super().result()

    def settle(self) -> None:
        """Turn what was given so far into sums."""
        for name, given in self._given.items():
            weight = sum(given.weights)
            if given.unrolled:
                total = weight * robust_mean(torch.stack(given.tensors), self._rule, self._trim)
                self._products[name] = self._products[name].add_(total) if name in self._products else total
                self._count(name, weight)
            elif all(rows is None for rows in given.rows):
                super().add(name, robust_mean(torch.stack(given.tensors), self._rule, self._trim), weight)
            else:
                self._settle_rows(name, given)
        self._given = {}

    def _settle_rows(self, name: str, given: _Given) -> None:
        """Apply the rule to each row over those who count there."""
        every = torch.ones(len(given.tensors[0]), dtype=torch.float64)
        counts = torch.stack([every if rows is None else rows for rows in given.rows]) > 0  # (clients, rows)
        stacked, weights = torch.stack(given.tensors), torch.tensor(given.weights, dtype=torch.float64)
        result = torch.zeros_like(given.tensors[0])
        for row in range(len(result)):
            if counts[:, row].any():
                result[row] = robust_mean(stacked[counts[:, row], row], self._rule, self._trim)
        super().add(name, result, 1.0, weights @ counts.double())


def robust_mean(stacked: Tensor, rule: Rule, trim: float) -> Tensor:
    """Return the rule over the first axis, of clients; trimmed is a share at each end, and at least one of three."""
    count = len(stacked)
    if count < FEWEST:
        return stacked.mean(0)
    ends = max(1, int(trim * count)) if rule == "trimmed-mean" else (count - 1) // 2
    if stacked.is_complex():
        parts = torch.view_as_real(stacked).sort(0).values[ends : count - ends].mean(0)
        return torch.view_as_complex(parts)
    return stacked.sort(0).values[ends : count - ends].mean(0)


def mean_of(server: ServerConfig, method: MethodConfig) -> MakeMean:
    """Return what makes a method's means: the weighted mean, or a rule for every number."""
    rule = server.robust
    if rule != "trimmed-mean" and rule != "median":
        return WeightedMean
    if not method.by_coordinate:
        raise FedhmError(
            f"server.robust = '{rule}' is for methods that average whole models, and {method.name} does not: "
            "set it to 'clip', 'centered-clip' or 'krum'"
        )
    return partial(CoordinateMean, rule=rule, trim=server.trim)
