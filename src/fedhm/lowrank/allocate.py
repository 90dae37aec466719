"""Ranks by layer: which directions of a model's layers are worth what they cost.

With singular values σ₁ ≥ σ₂ ≥ … in a layer, and c what one more rank of it costs (parameters, or MACs),

    maximise  Σ over layers  Σ_{i ≤ r} σᵢ²        with  Σ over layers  r c  within the budget

Energies fall with i, so the best ranks take directions by energy per cost, σᵢ² / c, from the largest down: optimal up
to one step (the fractional knapsack). That is one order of all directions, of which every budget's ranks are a
beginning: a smaller budget has no larger rank in any layer than a larger one.

A spectrum that is flat, or that of random numbers, says nothing of which directions matter: how long its layer's
weights are only says how they were drawn. Unless most layers' say more, all directions count the same, and layers get
their ranks in turns, each in proportion to its size: what one ratio for all layers gives them.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedhm.errors import FedhmError
from fedhm.lowrank.decompositions.unroll import unroll, unrolled_shape
from fedhm.lowrank.layers import whole_rank
from fedhm.lowrank.plan import RankPlan
from fedhm.machine.side_by_side import side_by_side

CHANCE = 0.1  # of a layer's energy: so much more than random numbers the leading directions may have by chance
PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the directions, where that is looked at


@dataclass(frozen=True)
class Layer:
    """What ranks of a layer are to be chosen by."""

    energies: Sequence[float]  # σ², the largest first: all of them
    shape: tuple[int, int]  # of its matrix
    whole: int  # its rank at ratio 1
    cost: float  # of one more rank

    @property
    def most(self) -> int:
        """Return the largest rank at which factorizing saves parameters; one step further it is dense."""
        return (math.prod(self.shape) - 1) // sum(self.shape)

    def kept(self, level: int) -> float:
        """Return the share of the energy that is kept at a rank, all of it where the layer is dense."""
        total = sum(self.energies)
        return 1.0 if level > self.most or total <= 0 else sum(self.energies[:level]) / total

    @property
    def tells(self) -> bool:
        """Tell whether the leading directions have more of the energy than random numbers would give them."""
        total, count = sum(self.energies), len(self.energies)
        for part in PARTS if total > 0 else ():
            rank = max(1, round(part * count))
            if sum(self.energies[:rank]) / total > random_share(self.shape, rank / count) + CHANCE:
                return True
        return False


def random_share(shape: tuple[int, int], part: float) -> float:
    """Return the share of the energy in this part of the directions, the largest, of a matrix of random numbers.

    By the law of Marchenko and Pastur: with aspect β ≤ 1 the energies λ lie between (1 ± √β)², as densely as
    √((b − λ)(λ − a)) / λ.
    """
    root = math.sqrt(min(shape) / max(shape))
    low, high = (1 - root) ** 2, (1 + root) ** 2
    singular = torch.linspace(1 + root, 1 - root, 2002, dtype=torch.float64)[1:-1]  # the ends have no weight
    values = singular.square()  # evenly spaced singular values: energies crowd at 0, if the matrix is square
    counts = ((high - values) * (values - low)).sqrt() / singular
    energy, counts = counts * values, counts.cumsum(0)
    reached = int((counts <= part * counts[-1]).sum())
    return float(energy[:reached].sum() / energy.sum())


def order_of(layers: Mapping[str, Layer]) -> list[str]:
    """Return the layers in the order in which each gets one rank more, after all have rank 1; the last makes it dense.

    Whatever the budget, its ranks are a beginning of this order.
    """
    known = 2 * sum(layer.tells for layer in layers.values()) > len(layers)

    def steps() -> Iterator[tuple[float, float, int, str]]:
        for number, (name, layer) in enumerate(layers.items()):
            energies = [energy / layer.cost if known else 0.0 for energy in layer.energies[: layer.most]]
            # what makes it dense adds all that is left, for less than one more rank would cost
            for rank, energy in enumerate([*energies[1:], energies[-1]], start=2):
                yield -energy, rank / layer.whole, number, name

    return [name for _, _, _, name in sorted(steps())]


def levels_after(layers: Mapping[str, Layer], order: Sequence[str], count: int) -> dict[str, int]:
    """Return each layer's rank after so many steps; `most` + 1 stands for dense."""
    levels = dict.fromkeys(layers, 1)
    for name in itertools.islice(order, count):
        levels[name] += 1
    return levels


def plan_of_levels(start: RankPlan, layers: Mapping[str, Layer], levels: Mapping[str, int]) -> RankPlan:
    """Return the rank plan at these levels; `start` says which layers can be factorized at all."""
    decisions: dict[str, int | str] = dict(start.decisions)
    for name, level in levels.items():
        within = level <= layers[name].most
        decisions[name] = level if within else f"rank {level} would hold no fewer parameters"
    return RankPlan(decisions, start.form)


def levels_of_plan(layers: Mapping[str, Layer], plan: Mapping[str, int]) -> dict[str, int]:
    """Return the levels of a rank plan: what it leaves dense is one above the largest rank."""
    return {name: min(plan.get(name, layer.most + 1), layer.most + 1) for name, layer in layers.items()}


def layers_of(weights: Mapping[str, Tensor], start: RankPlan) -> dict[str, Layer]:
    """Return what ranks are chosen by, of every layer that `start` factorizes; the cost of a rank is its parameters."""

    def layer_of(name: str) -> Layer:
        weight = weights[f"{name}.weight"].detach()
        shape = unrolled_shape(weight.shape, start.form)
        return Layer(energies(unroll(weight, start.form)), shape, whole_rank(weight.shape), sum(shape))

    names = list(start)
    return dict(zip(names, side_by_side(layer_of, names), strict=True))


def at_cost(layers: Mapping[str, Layer], costs: Mapping[str, float]) -> dict[str, Layer]:
    """Return the layers with other costs of a rank."""
    return {name: replace(layer, cost=costs[name]) for name, layer in layers.items()}


def energies(matrix: Tensor) -> list[float]:
    """Return the squares of all singular values, the largest first."""
    if not bool(matrix.isfinite().all()):
        raise FedhmError("a weight matrix holds NaN or infinite values: there is no rank to plan for it")
    precise = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    found: list[float] = torch.linalg.eigvalsh(precise @ precise.T).flip(0).clamp(min=0).tolist()
    return found
