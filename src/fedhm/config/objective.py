"""An objective defines what is learned: the loss and the metrics. The first metric is the headline."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import GetCoreSchemaHandler
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function
from torch import Tensor

from fedhm.config.section import Section


class Metrics(dict[str, float]):
    """A network's metrics by name. Names are attributes, too: `metrics.accuracy`."""

    def __getattr__(self, name: str) -> float:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no metric '{name}', known are {', '.join(self)}") from None

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let pydantic read records with metrics."""
        return no_info_after_validator_function(cls, handler(dict[str, float]))


@dataclass(frozen=True)
class Metric:
    """A number that says how good a network is, and how it is shown."""

    name: str  # in records, tables and files
    more_is_better: bool = True
    percent: bool = False

    def axis(self, evaluated_on: str) -> str:
        """Return the label of a plot's axis: `test accuracy (%)`."""
        return f"{evaluated_on} {self.name}{' (%)' if self.percent else ''}"

    @property
    def quoted(self) -> str:
        """Return the metric with its unit, for a sentence: `accuracy in percent`."""
        return f"{self.name}{' in percent' if self.percent else ''}"

    @property
    def stem(self) -> str:
        """Return the metric's part of file names: `accuracy` in `accuracy-by-round.png`."""
        return re.sub(r"[^\w.-]+", "-", self.name)

    @property
    def decimals(self) -> int:
        """Return the decimals of the scaled value in tables."""
        return 2 if self.percent else 4

    def scaled(self, value: float) -> float:
        """Return the value for plots and comparisons."""
        return 100 * value if self.percent else value

    def shown(self, value: float) -> str:
        """Return the value as tables show it."""
        return f"{self.scaled(value):.{self.decimals}f}{' %' if self.percent else ''}"

    def brief(self, *values: float) -> str:
        """Return values in short form, for lines with many of them: `97.1/96.4%`."""
        numbers = (f"{self.scaled(value):.{1 if self.percent else 3}f}" for value in values)
        return "/".join(numbers) + ("%" if self.percent else "")

    def goal(self, target: float) -> str:
        """Return a target in words: `70 % accuracy`, `r2 = 0.7`."""
        return f"{100 * target:g} % {self.name}" if self.percent else f"{self.name} = {target:g}"

    def reaches(self, value: float, target: float) -> bool:
        return value >= target if self.more_is_better else value <= target

    def best(self, values: Iterable[float]) -> float:
        return max(_numbers(values)) if self.more_is_better else min(_numbers(values))

    def worst(self, values: Iterable[float]) -> float:
        return min(_numbers(values)) if self.more_is_better else max(_numbers(values))


def _numbers(values: Iterable[float]) -> list[float]:
    """Return the values without NaN, which is neither better nor worse; if all are NaN, return all."""
    known = list(values)
    return [value for value in known if not math.isnan(value)] or known


class Objective(Section, ABC):
    """An objective with its settings. Subclass it for an objective of your own."""

    name: str
    metrics: ClassVar[tuple[Metric, ...]]  # the headline first
    has_labels: ClassVar[bool] = False  # targets are class numbers, of which a client may lack some
    scaled_loss: ClassVar[bool] = False  # its gradients have a known scale, as those of a cross-entropy
    per_token: ClassVar[bool] = False  # every token has a target, and the outputs are those of the base model
    lowest_loss: ClassVar[float | None] = None  # a bound that no loss is below, if one is known
    # the least and the most that one sample can add to each sum, if known: it bounds the lies of a client
    sum_bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}

    @property
    def headline(self) -> Metric:
        return self.reported[0]

    @property
    def reported(self) -> tuple[Metric, ...]:
        """Return all metrics of a run, the headline first: those of the class, and perhaps a user's own."""
        return self.metrics

    @property
    def measurable(self) -> bool:
        """Tell whether this process can compute the metrics, and not only show them."""
        return True

    @property
    def clips_gradients(self) -> bool:
        """Tell whether the method's own limit on gradients (`train.clip_norm = "auto"`) makes sense for this loss."""
        return self.has_labels or self.scaled_loss

    @property
    def loss_bound(self) -> float | None:
        """Return a bound that no loss of this run is below, if one is known."""
        return self.lowest_loss

    def sum_bound(self, name: str) -> tuple[float, float] | None:
        """Return the least and the most that one sample can add to a sum, if known."""
        return self.sum_bounds.get(name)

    @abstractmethod
    def as_targets(self, given: Tensor, whose: str, dtype: torch.dtype) -> Tensor:
        """Return a user's labels in the type that is learned, or refuse them; `dtype` is the model's."""

    @abstractmethod
    def outputs(self, targets: Sequence[Tensor]) -> int:
        """Return the number of outputs that these targets need: classes, or numbers to predict."""

    @abstractmethod
    def check(self, targets: Tensor, outputs: int, whose: str) -> None:
        """Refuse targets that a network with `outputs` outputs cannot learn."""

    @abstractmethod
    def check_output(self, output: Tensor, outputs: int) -> None:
        """Refuse a model whose output for a single input is `output`."""

    @abstractmethod
    def loss(self, output: Tensor, targets: Tensor, held: tuple[int, ...] | None) -> Tensor:
        """Return the mean loss of a batch; `held` are the client's own labels, if the loss is masked."""

    @abstractmethod
    def sums(self, output: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Return sums over one batch. Added over all batches, they determine the metrics."""

    @abstractmethod
    def results(self, sums: Mapping[str, Tensor], samples: int) -> Metrics:
        """Return the metrics, from float64 sums over all batches and the number of samples."""

    @abstractmethod
    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the distance of a student's outputs from its teacher's, for methods that distil."""

    def condensed(self, targets: Tensor) -> Tensor:
        """Return smaller targets that `check` and `outputs` judge alike: targets of large data are not kept."""
        return targets

    def held(self, targets: Tensor) -> tuple[int, ...] | None:  # noqa: ARG002
        """Return the labels among a client's targets, or None; a masked loss ignores all other labels."""
        return None

    def sample_losses(self, output: Tensor, targets: Tensor, held: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return the loss of each sample (N,), if `loss` is their mean; None: it is not, or nobody has said so.

        A training graph for devices needs it, to weigh the samples of a batch.

        held  (outputs,): 1 for the client's own labels, 0 for others; all 1 if the loss is not masked
        """
        return None
