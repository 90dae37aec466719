"""Regression: the mean squared error of numbers in any shape; R², the explained share of their variance.

R² = 1 − Σ (y − f)² / Σ (y − ȳ)²        for each number, then averaged

The clients' sums give Σ (y − ȳ)² = Σ y² − (Σ y)² / n. If targets are far from 0, the two terms are nearly equal, and
rounding would destroy their difference. So both are summed in parts that are exact.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhm.config.objective import Metric, Metrics
from fedhm.errors import FedhmError
from fedhm.objectives.own_parts import WithOwnParts

# parts of a number are multiples of these: the sums over 2**26 samples of squares up to 1e20 are exact
GRIDS = (2.0**40, 2.0**14, 2.0**-12, 2.0**-38, 2.0**-64)


class Regression(WithOwnParts):
    """Numbers in any shape, such as images. It takes a user's own `loss` and `metrics`."""

    name: Literal["regression"] = "regression"
    metrics: ClassVar = (Metric("r2"), Metric("mse", more_is_better=False))
    lowest_loss: ClassVar[float | None] = 0.0
    # the part 2ab of a square may be negative, but only in its lower half of digits
    sum_bounds: ClassVar = {"errors": (0.0, 1e20), "targets": (-1e10, 1e10), "squares": (-2e13, 1e20)}

    def as_targets(self, given: Tensor, whose: str, dtype: torch.dtype) -> Tensor:
        if given.is_complex():
            raise FedhmError(f"the targets of {whose} are complex: give their real and imaginary parts as two numbers")
        targets = given.to(dtype)
        if not bool(targets.isfinite().all()):
            raise FedhmError(f"the targets of {whose} hold NaN or infinite values")
        return targets

    def outputs(self, targets: Sequence[Tensor]) -> int:
        return max((_columns(each) for each in targets if len(each)), default=1)

    def check(self, targets: Tensor, outputs: int, whose: str) -> None:
        if not targets.is_floating_point():
            raise FedhmError(f"{whose} has no numbers to predict, but class numbers: set objective = 'classification'")
        if _columns(targets) != outputs:
            raise FedhmError(f"{whose} has {_columns(targets)} numbers to predict for each sample, others {outputs}")

    def check_output(self, output: Tensor, outputs: int) -> None:
        if output.numel() != outputs:
            shape = tuple(output.shape)
            raise FedhmError(f"the model must give {outputs} numbers for each sample, but its output is {shape}")

    def loss(self, output: Tensor, targets: Tensor, held: tuple[int, ...] | None) -> Tensor:
        output = output.reshape(targets.shape)
        own = self.mean_loss(output, targets)
        return F.mse_loss(output, targets) if own is None else own

    def sample_losses(self, output: Tensor, targets: Tensor, held: Tensor) -> Tensor | None:
        errors = output.reshape(targets.shape) - targets
        squares = errors * errors
        return squares if squares.ndim == 1 else squares.flatten(1).mean(1)

    def sums(self, output: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        y = targets.double().view(len(targets), -1)  # (batch, numbers)
        error = output.double().reshape(y.shape) - y
        return {
            "errors": error.square().sum(0),
            "targets": _parts(y).sum(1),
            "squares": _square_parts(y).sum(1),
            **self.own_sums(output.reshape(targets.shape), targets),
        }

    def results(self, sums: Mapping[str, Tensor], samples: int) -> Metrics:
        numbers = zip(sums["errors"].tolist(), sums["targets"].T.tolist(), sums["squares"].T.tolist(), strict=True)
        explained = [_explained(errors, targets, squares, samples) for errors, targets, squares in numbers]
        return Metrics(
            r2=sum(explained) / len(explained),
            mse=sums["errors"].mean().item() / samples,
            **self.own_results(sums, samples),
        )

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        return F.mse_loss(student, teacher)


def _columns(targets: Tensor) -> int:
    return math.prod(targets.shape[1:])


def _parts(values: Tensor) -> Tensor:
    """Return parts that add up to the values. Each has so few digits that its sum over samples is exact."""
    parts = []
    for grid in GRIDS:
        parts.append((values / grid).round() * grid)
        values = values - parts[-1]
    return torch.stack([*parts, values])


def _square_parts(y: Tensor) -> Tensor:
    """Return parts of y². With y = a + b, each with half of the digits, a², 2ab and b² are exact."""
    a = y.float().double()
    a = torch.where(a.isfinite(), a, y)
    b = y - a
    return _parts(a * a) + _parts(2 * a * b) + _parts(b * b)


def _explained(errors: float, targets: list[float], squares: list[float], samples: int) -> float:
    if not all(map(math.isfinite, [errors, *targets, *squares])):
        return math.nan
    total, of_squares = sum(map(Fraction, targets)), sum(map(Fraction, squares))
    spread = of_squares - total * total / samples
    # the error of the squares: the last digits of each, and the sum of the parts below all grids
    rounding = of_squares / 2**96 + min(of_squares, samples * Fraction(GRIDS[-1])) / 2**46
    # equal targets have no variance to explain: as in scikit-learn, 1 if all are predicted exactly, else 0
    if spread <= rounding:
        return float(errors == 0)
    return float(1 - Fraction(errors) / spread)


ENTRY_POINT = Regression
