"""Stand-ins for methods and objectives that this process does not know, so that reports can read runs with them.

A user's own method or objective, given to `fedhm.run` as an object, is known in that Python program alone. The run's
folder has its name, its settings and its metrics, which is all that a report needs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor
from torch import nn as torch_nn

from fedhm.config.method import MethodConfig
from fedhm.config.objective import Metric, Metrics, Objective
from fedhm.config.registry import Group, UnknownNameError, find, register
from fedhm.errors import FedhmError


class UnknownMethod(MethodConfig):
    """The settings of a method that is not known here."""

    model_config = ConfigDict(extra="allow")
    placeholder: ClassVar[bool] = True

    def build(self, model: torch_nn.Module, setup: Any) -> Any:
        raise _unknown("method", self.name)


class UnknownObjective(Objective):
    """The settings of an objective that is not known here; subclasses have its metrics."""

    model_config = ConfigDict(extra="allow")
    placeholder: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = ()

    @property
    def measurable(self) -> bool:
        return False

    def as_targets(self, given: Tensor, whose: str, dtype: torch.dtype) -> Tensor:
        raise _unknown("objective", self.name)

    def outputs(self, targets: Sequence[Tensor]) -> int:
        raise _unknown("objective", self.name)

    def check(self, targets: Tensor, outputs: int, whose: str) -> None:
        raise _unknown("objective", self.name)

    def check_output(self, output: Tensor, outputs: int) -> None:
        raise _unknown("objective", self.name)

    def loss(self, output: Tensor, targets: Tensor, held: tuple[int, ...] | None) -> Tensor:
        raise _unknown("objective", self.name)

    def sums(self, output: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        raise _unknown("objective", self.name)

    def results(self, sums: Mapping[str, Tensor], samples: int) -> Metrics:
        raise _unknown("objective", self.name)

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        raise _unknown("objective", self.name)


def _unknown(what: str, name: str) -> FedhmError:
    return FedhmError(
        f"the {what} '{name}' is not known here: run or resume it in the Python program that defines it, or install "
        "the package that has it"
    )


def is_placeholder(kind: type[Any]) -> bool:
    return bool(getattr(kind, "placeholder", False))


def stand_in(table: Mapping[str, Any], metrics: Sequence[Metric]) -> None:
    """Register stand-ins for the method and the objective of a run, if this process does not know them."""
    given: tuple[tuple[str, Group], ...] = (("method", "methods"), ("objective", "objectives"))
    for section, group in given:
        own = table.get(section)
        name = own.get("name") if isinstance(own, Mapping) else None
        if not isinstance(name, str) or _is_known(group, name):
            continue
        if group == "methods":
            register(group, name, UnknownMethod)
        elif metrics:
            found = tuple(metrics)
            register(group, name, type("UnknownObjective", (UnknownObjective,), {"metrics": found}))


def _is_known(group: Group, name: str) -> bool:
    try:
        return not is_placeholder(find(group, name))
    except UnknownNameError:
        return False
