"""Segmentation: a class for every pixel. Cross-entropy; mean intersection over union, and accuracy of pixels.

IoU of a class = right / (actual + predicted − right)        for classes that are actual or predicted

Targets are (N, H, W), and outputs (N, classes, H, W). Pixels with the target `ignore_index` do not count.
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

# masks of 8 bits often have 255 for pixels that do not count, or for a single class
VOID = (
    ". A pixel has the class 255: if such pixels do not count, set objective.ignore_index = 255; masks of 0 and 255 "
    "become classes by mask // 255"
)


class Segmentation(WithOwnParts):
    """A class for every pixel; pixels of the class `ignore_index` do not count. It takes own `loss` and `metrics`."""

    name: Literal["segmentation"] = "segmentation"
    ignore_index: int = -100
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("mean_iou", percent=True),
        Metric("pixel_accuracy", percent=True),
        Metric("loss", more_is_better=False),
    )
    lowest_loss: ClassVar[float | None] = 0.0
    scaled_loss: ClassVar[bool] = True

    def as_targets(self, given: Tensor, whose: str, dtype: torch.dtype) -> Tensor:
        if given.is_complex() or (given.is_floating_point() and not torch.equal(given, given.round())):
            raise FedhmError(f"the masks of {whose} must hold a whole class number for every pixel")
        if given.ndim == 4 and given.shape[1] == 1:
            given = given[:, 0]
        if given.ndim != 3:
            raise FedhmError(f"the masks of {whose} must be of shape (N, H, W), not {tuple(given.shape)}")
        return given.long()

    def outputs(self, targets: Sequence[Tensor]) -> int:
        return 1 + max((int(each.max()) for each in map(self._counted, targets) if len(each)), default=0)

    def check(self, targets: Tensor, outputs: int, whose: str) -> None:
        if targets.dtype != torch.int64 or targets.ndim != 3:
            raise FedhmError(f"{whose} has no masks of shape (N, H, W) to learn")
        counted = self._counted(targets)
        if len(counted) and (counted.min() < 0 or counted.max() >= outputs):
            odd = int(counted.min() if counted.min() < 0 else counted.max())
            raise FedhmError(
                f"{whose} has a pixel of class {odd}, outside 0…{outputs - 1}: if such pixels do not count, set "
                f"objective.ignore_index = {odd}"
            )

    def check_output(self, output: Tensor, outputs: int) -> None:
        if output.ndim != 4 or output.shape[1] < outputs:
            raise FedhmError(
                f"the model must give a score for each of {outputs} classes at every pixel, (N, {outputs}, H, W), but "
                f"its output is {tuple(output.shape)}{VOID if outputs == 256 else ''}"
            )

    def condensed(self, targets: Tensor) -> Tensor:
        """Return the lowest and the highest class of every mask, as masks of two pixels."""
        flat = targets.flatten(1)
        ignored = flat == self.ignore_index
        lowest = torch.where(ignored, torch.iinfo(torch.int64).max, flat).amin(1)
        highest = torch.where(ignored, torch.iinfo(torch.int64).min, flat).amax(1)
        empty = ignored.all(1)
        found = torch.stack([lowest, highest], 1).masked_fill(empty[:, None], self.ignore_index)
        return found[:, None]

    def loss(self, output: Tensor, targets: Tensor, held: tuple[int, ...] | None) -> Tensor:
        _check_sizes(output, targets)
        own = self.mean_loss(output, targets)
        # a batch of which no pixel counts has a loss of 0, not NaN
        return self._summed(output, targets) / self._number(targets).clamp(min=1) if own is None else own

    def sums(self, output: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        _check_sizes(output, targets)
        classes, counted = output.shape[1], targets != self.ignore_index
        guesses = output.argmax(1)
        right = (guesses == targets) & counted & ~output.isnan().any(1)  # argmax takes NaN for the largest number
        chosen = {"right": guesses[right], "actual": targets[counted], "predicted": guesses[counted]}
        own = self.mean_loss(output, targets)
        total = self._summed(upcast_half(output), targets) if own is None else own * self._number(targets)
        return {
            **{name: torch.bincount(each, minlength=classes) for name, each in chosen.items()},
            "loss": total,
            **self.own_sums(output, targets),
        }

    def results(self, sums: Mapping[str, Tensor], samples: int) -> Metrics:
        right, pixels = sums["right"], max(1.0, sums["actual"].sum().item())
        either = sums["actual"] + sums["predicted"] - right
        overlap = (right / either.clamp(min=1))[either > 0]
        return Metrics(
            mean_iou=overlap.mean().item() if len(overlap) else 0.0,
            pixel_accuracy=right.sum().item() / pixels,
            loss=sums["loss"].item() / pixels,
            **self.own_results(sums, samples),
        )

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        return F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)

    def _counted(self, targets: Tensor) -> Tensor:
        return targets[targets != self.ignore_index]

    def _number(self, targets: Tensor) -> Tensor:
        return (targets != self.ignore_index).sum()

    def _summed(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets, ignore_index=self.ignore_index, reduction="sum")


def _check_sizes(output: Tensor, targets: Tensor) -> None:
    if output.shape[2:] != targets.shape[1:]:
        size, wanted = ("×".join(map(str, sides)) for sides in (output.shape[2:], targets.shape[1:]))
        raise ValueError(f"the model gives scores for {size} pixels, and the masks have {wanted}")


ENTRY_POINT = Segmentation
