"""An objective says what is learned: the loss, the metrics, and which of them is the headline."""

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
    """A network's metrics by their names, which are attributes too: `metrics.accuracy`."""

    def __getattr__(self, name: str) -> float:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no metric '{name}', known are {', '.join(self)}") from None

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let records that hold metrics be read by their types."""
        return no_info_after_validator_function(cls, handler(dict[str, float]))


@dataclass(frozen=True)
class Metric:
    """One of the numbers that tell how good a network is, and how it is shown."""

    name: str  # in records, tables and files
    more_is_better: bool = True
    percent: bool = False

    def axis(self, evaluated_on: str) -> str:
        """Return how the axis of a plot is labelled: `test accuracy (%)`."""
        return f"{evaluated_on} {self.name}{' (%)' if self.percent else ''}"

    @property
    def quoted(self) -> str:
        """Return how a sentence calls the metric with its unit: `accuracy in percent`."""
        return f"{self.name}{' in percent' if self.percent else ''}"

    @property
    def stem(self) -> str:
        """Return how files are named after the metric: `accuracy`, of `accuracy-by-round.png`."""
        return re.sub(r"[^\w.-]+", "-", self.name)

    @property
    def decimals(self) -> int:
        """Return how many decimals of the scaled value tables have."""
        return 2 if self.percent else 4

    def scaled(self, value: float) -> float:
        """Return the value as plots and comparisons have it."""
        return 100 * value if self.percent else value

    def shown(self, value: float) -> str:
        """Return the value as tables have it."""
        return f"{self.scaled(value):.{self.decimals}f}{' %' if self.percent else ''}"

    def brief(self, *values: float) -> str:
        """Return values in short form, for lines in which many stand side by side: `97.1/96.4%`."""
        numbers = (f"{self.scaled(value):.{1 if self.percent else 3}f}" for value in values)
        return "/".join(numbers) + ("%" if self.percent else "")

    def goal(self, target: float) -> str:
        """Return how a sentence calls a value that is to be reached: `70 % accuracy`, `r2 = 0.7`."""
        return f"{100 * target:g} % {self.name}" if self.percent else f"{self.name} = {target:g}"

    def reaches(self, value: float, target: float) -> bool:
        return value >= target if self.more_is_better else value <= target

    def best(self, values: Iterable[float]) -> float:
        return max(_numbers(values)) if self.more_is_better else min(_numbers(values))

    def worst(self, values: Iterable[float]) -> float:
        return min(_numbers(values)) if self.more_is_better else max(_numbers(values))


def _numbers(values: Iterable[float]) -> list[float]:
    """Return the values without NaN, of which none is the better; if there are no others, as they are."""
    known = list(values)
    return [value for value in known if not math.isnan(value)] or known


class Objective(Section, ABC):
    """An objective with its settings: subclass it to bring one of your own."""

    name: str
    metrics: ClassVar[tuple[Metric, ...]]  # the headline first
    has_labels: ClassVar[bool] = False  # a client holds some labels and lacks others
    per_token: ClassVar[bool] = False  # every token of a sequence has a target, and the outputs are those of the base
    sum_bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}  # the least and the most that one sample can add to a
    # sum, where that is known: so much can a client lie that evaluates

    @property
    def headline(self) -> Metric:
        return self.metrics[0]

    @abstractmethod
    def as_targets(self, given: Tensor, whose: str, dtype: torch.dtype) -> Tensor:
        """Return what a user gave as labels in the type that is learned, or refuse it; `dtype` is the model's."""

    @abstractmethod
    def outputs(self, targets: Sequence[Tensor]) -> int:
        """Return how many outputs a network needs for these targets: classes, or numbers to predict."""

    @abstractmethod
    def check(self, targets: Tensor, outputs: int, whose: str) -> None:
        """Refuse targets that a network with so many outputs cannot learn."""

    @abstractmethod
    def check_output(self, output: Tensor, outputs: int) -> None:
        """Refuse a model that gives `output` for a single input."""

    @abstractmethod
    def loss(self, output: Tensor, targets: Tensor, held: tuple[int, ...] | None) -> Tensor:
        """Return the mean loss of a batch; `held` has the labels that the client holds, if its loss is masked."""

    @abstractmethod
    def sums(self, output: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Return, of one batch, the sums from which the metrics of all batches follow."""

    @abstractmethod
    def results(self, sums: Mapping[str, Tensor], samples: int) -> Metrics:
        """Return the metrics from the sums over all batches, in float64, and the number of samples."""

    @abstractmethod
    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return how far a student's outputs are from those that it is to learn, for methods that distil."""

    def held(self, targets: Tensor) -> tuple[int, ...] | None:  # noqa: ARG002
        """Return the labels among a client's targets, where there are such: a masked loss leaves the others alone."""
        return None
