"""Several labels for each sample, each of them true or not: binary cross-entropy; F1, and the share of right answers.

F1 = 2 · hits / (actual + predicted)        over all labels together ("micro")

Targets are (N, labels), of zeros and ones. A label is predicted if its score is above 0.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhm.config.objective import Metric, Metrics
from fedhm.errors import FedhmError
from fedhm.networks.exchange import upcast_half
from fedhm.objectives.own_parts import WithOwnParts


class MultiLabel(WithOwnParts):
    """Several labels for each sample, each of them true or not. It takes a user's own `loss` and `metrics`."""

    name: Literal["multilabel"] = "multilabel"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("f1", percent=True),
        Metric("label_accuracy", percent=True),
        Metric("loss", more_is_better=False),
    )
    lowest_loss: ClassVar[float | None] = 0.0
    scaled_loss: ClassVar[bool] = True
    sum_bounds: ClassVar = {
        "hits": (0.0, 1.0), "actual": (0.0, 1.0), "predicted": (0.0, 1.0), "right": (0.0, 1.0),
        "loss": (0.0, 2e6),  # of outputs within ±1e6
    }  # fmt: skip

    def as_targets(self, given: Tensor, whose: str, dtype: torch.dtype) -> Tensor:
        if given.ndim != 2 or not bool(((given == 0) | (given == 1)).all()):
            raise FedhmError(
                f"the targets of {whose} must be zeros and ones of shape (N, labels), not {tuple(given.shape)}: a one "
                "for each label that a sample has"
            )
        return given.to(dtype)

    def outputs(self, targets: Sequence[Tensor]) -> int:
        return max((each.shape[1] for each in targets if len(each)), default=1)

    def check(self, targets: Tensor, outputs: int, whose: str) -> None:
        if not targets.is_floating_point() or targets.ndim != 2 or targets.shape[1] != outputs:
            raise FedhmError(f"{whose} has targets of shape {tuple(targets.shape)}, others have {outputs} labels")

    def check_output(self, output: Tensor, outputs: int) -> None:
        if output.ndim != 2 or output.shape[1] != outputs:
            shape = tuple(output.shape)
            raise FedhmError(f"the model must give a score for each of {outputs} labels, but its output is {shape}")

    def loss(self, output: Tensor, targets: Tensor, held: tuple[int, ...] | None) -> Tensor:
        own = self.mean_loss(output, targets)
        return F.binary_cross_entropy_with_logits(output, targets) if own is None else own

    def sums(self, output: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        guesses, actual = output > 0, targets > 0.5
        own = self.mean_loss(output, targets)
        mean = F.binary_cross_entropy_with_logits(upcast_half(output), targets) if own is None else own
        return {
            "hits": (guesses & actual).sum(0),
            "actual": actual.sum(0),
            "predicted": guesses.sum(0),
            "right": ((guesses == actual) & ~output.isnan()).sum(0),
            "loss": mean * len(targets),
            **self.own_sums(output, targets),
        }

    def results(self, sums: Mapping[str, Tensor], samples: int) -> Metrics:
        either = (sums["actual"] + sums["predicted"]).sum().item()
        return Metrics(
            f1=2 * sums["hits"].sum().item() / either if either else 1.0,
            label_accuracy=sums["right"].mean().item() / samples,
            loss=sums["loss"].item() / samples,
            **self.own_results(sums, samples),
        )

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(student, teacher.sigmoid())


ENTRY_POINT = MultiLabel
