"""Regression: the mean squared error of one or several numbers; R², the share of their variance that is explained.

R² = 1 − Σ (y − f)² / Σ (y − ȳ)²        of each number, and the mean of these
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhm.config.sections.objective import Metric, Metrics, Objective
from fedhm.errors import FedhmError


class Regression(Objective):
    name: Literal["regression"] = "regression"
    metrics: ClassVar = (Metric("r2"), Metric("mse", more_is_better=False))
    sum_bounds: ClassVar = {"errors": (0.0, 1e20), "targets": (-1e10, 1e10), "squares": (0.0, 1e20)}

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
        if not targets.is_floating_point() or targets.ndim > 2:
            raise FedhmError(f"{whose} has no numbers to predict, but class numbers: set objective = 'classification'")
        if _columns(targets) != outputs:
            raise FedhmError(f"{whose} has {_columns(targets)} numbers to predict for each sample, others {outputs}")

    def check_output(self, output: Tensor, outputs: int) -> None:
        if output.numel() != outputs:
            shape = tuple(output.shape)
            raise FedhmError(f"the model must give {outputs} numbers for each sample, but its output is {shape}")

    def loss(self, output: Tensor, targets: Tensor, held: tuple[int, ...] | None) -> Tensor:
        return F.mse_loss(output.reshape(targets.shape), targets)

    def sums(self, output: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        # float64: variances are differences of sums that may be nearly equal
        y = targets.double().view(len(targets), -1)  # (batch, numbers)
        error = output.double().reshape(y.shape) - y
        return {"errors": error.square().sum(0), "targets": y.sum(0), "squares": y.square().sum(0)}

    def results(self, sums: Mapping[str, Tensor], samples: int) -> Metrics:
        spread = sums["squares"] - sums["targets"].square() / samples
        # of numbers that are all alike there is nothing to explain: as scikit-learn, 1 if they were met, else 0
        alike = spread <= 1e-14 * sums["squares"]
        explained = torch.where(alike, (sums["errors"] == 0).double(), 1 - sums["errors"] / spread.clamp(min=1e-300))
        return Metrics(r2=explained.mean().item(), mse=sums["errors"].mean().item() / samples)

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        return F.mse_loss(student, teacher)


def _columns(targets: Tensor) -> int:
    return targets.shape[1] if targets.ndim > 1 else 1


ENTRY_POINT = Regression
