"""Classification: cross-entropy, if asked masked to the labels that a client holds; accuracy."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhm.config.objective import Metric, Metrics
from fedhm.errors import FedhmError
from fedhm.networks.exchange import upcast_half
from fedhm.objectives.own_parts import WithOwnParts


class Classification(WithOwnParts):
    """Class numbers. It takes a user's own `loss`, which sees masked scores, and `metrics`."""

    name: Literal["classification"] = "classification"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("accuracy", percent=True), Metric("loss", more_is_better=False))
    has_labels: ClassVar = True
    lowest_loss: ClassVar[float | None] = 0.0
    sum_bounds: ClassVar = {"correct": (0.0, 1.0), "loss": (0.0, 3e6)}  # of outputs within ±1e6

    def as_targets(self, given: Tensor, whose: str, dtype: torch.dtype) -> Tensor:
        if given.is_complex() or (given.is_floating_point() and not torch.equal(given, given.round())):
            raise FedhmError(
                f"the labels of {whose} must be whole class numbers; to predict numbers, set objective = 'regression'"
            )
        if given.ndim > 2:
            raise FedhmError(
                f"the labels of {whose} are one for each pixel, {tuple(given.shape)}: set objective = 'segmentation', "
                "or give one class number for each sample"
            )
        if given.ndim == 2 and given.shape[1] > 1:
            raise FedhmError(
                f"the labels of {whose} must be one class number for each sample, not {tuple(given.shape)}: take "
                "labels.argmax(1) if they are one-hot, or set objective = 'multilabel' if a sample has several"
            )
        return given.long()

    def outputs(self, targets: Sequence[Tensor]) -> int:
        return 1 + max((int(labels.max()) for labels in targets if len(labels)), default=0)

    def check(self, targets: Tensor, outputs: int, whose: str) -> None:
        if targets.dtype != torch.int64 or targets.ndim != 1:
            raise FedhmError(f"{whose} has no class numbers to learn; to predict numbers, set objective = 'regression'")
        if targets.min() < 0 or targets.max() >= outputs:
            raise FedhmError(f"{whose} has labels outside 0…{outputs - 1}")

    def check_output(self, output: Tensor, outputs: int) -> None:
        if output.ndim != 2 or output.shape[1] < outputs:
            shape = tuple(output.shape)
            raise FedhmError(f"the model must give a score for each of {outputs} classes, but its output is {shape}")

    def held(self, targets: Tensor) -> tuple[int, ...]:
        return tuple(targets.unique().tolist())

    def loss(self, output: Tensor, targets: Tensor, held: tuple[int, ...] | None) -> Tensor:
        if not self.own_loss:
            return masked_cross_entropy(output, targets, held)
        own = self.mean_loss(masked(output, held), targets)
        assert own is not None
        return own

    def sample_losses(self, output: Tensor, targets: Tensor, held: Tensor) -> Tensor | None:
        logits = torch.where(held > 0, output, torch.zeros_like(output))
        # not an index: the runtime of a device has no backward operator for it
        own = (targets[:, None] == torch.arange(output.shape[1])).to(output.dtype)
        return -(logits.log_softmax(1) * own).sum(1)

    def sums(self, output: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        own = self.mean_loss(output, targets)
        total = F.cross_entropy(upcast_half(output), targets, reduction="sum") if own is None else own * len(targets)
        return {
            # argmax takes NaN for the largest number; it is never correct
            "correct": ((output.argmax(1) == targets) & ~output.isnan().any(1)).sum(),
            "loss": total,
            **self.own_sums(output, targets),
        }

    def results(self, sums: Mapping[str, Tensor], samples: int) -> Metrics:
        return Metrics(
            accuracy=sums["correct"].item() / samples,
            loss=sums["loss"].item() / samples,
            **self.own_results(sums, samples),
        )

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return KL(softmax(t) ‖ softmax(f))."""
        return F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)


def masked_cross_entropy(logits: Tensor, targets: Tensor, held: tuple[int, ...] | None) -> Tensor:
    """Return the cross-entropy with logits of 0 for labels that a client does not hold: they learn nothing."""
    return F.cross_entropy(masked(logits, held), targets)


def masked(logits: Tensor, held: tuple[int, ...] | None) -> Tensor:
    """Return logits (N, classes), or (N, exits, classes), with zeros for labels that a client does not hold."""
    if held is None or len(held) >= logits.shape[-1]:
        return logits
    return logits.masked_fill(_missing(held, logits.shape[-1], logits.device), 0.0)


@lru_cache(maxsize=1)  # every batch of a client has the same labels
def _missing(labels: tuple[int, ...], classes: int, device: torch.device) -> Tensor:
    missing = torch.ones(classes, dtype=torch.bool)
    missing[list(labels)] = False
    return missing.to(device)


ENTRY_POINT = Classification
