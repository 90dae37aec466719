"""Classification of sequences: cross-entropy; accuracy, and F1 averaged over the classes.

F1 of a class = 2 · right / (actual + predicted)        for classes that are actual or predicted
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedhm.config.objective import Metric, Metrics
from fedhm.objectives.classification import Classification


class SequenceClassification(Classification):
    name: Literal["sequence_classification"] = "sequence_classification"  # type: ignore[assignment]
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", percent=True),
        Metric("macro_f1", percent=True),
        Metric("loss", more_is_better=False),
    )
    sum_bounds: ClassVar = {
        **Classification.sum_bounds,
        "right": (0.0, 1.0), "actual": (0.0, 1.0), "predicted": (0.0, 1.0),
    }  # fmt: skip

    def sums(self, output: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        classes, guesses = output.shape[1], output.argmax(1)
        right = guesses[(guesses == targets) & ~output.isnan().any(1)]
        found = {"right": right, "actual": targets, "predicted": guesses}
        counts = {name: torch.bincount(each, minlength=classes) for name, each in found.items()}
        return {**super().sums(output, targets), **counts}

    def results(self, sums: Mapping[str, Tensor], samples: int) -> Metrics:
        plain = super().results(sums, samples)
        either = sums["actual"] + sums["predicted"]
        f1 = (2 * sums["right"] / either.clamp(min=1))[either > 0]
        own = self.own_results(sums, samples)
        return Metrics(accuracy=plain.accuracy, macro_f1=f1.mean().item(), loss=plain.loss, **own)


ENTRY_POINT = SequenceClassification
