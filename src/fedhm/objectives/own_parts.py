"""A user's own loss and metrics in an objective of the library: `Classification(loss=…, metrics={"top5": …})`.

Functions are not settings: a config holds their names. So reports read runs with own losses and metrics, and only
training and evaluation need the functions.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

from fedhm.config.objective import Metric, Objective
from fedhm.config.section import is_empty
from fedhm.errors import FedhmError

Function = Callable[[Tensor, Tensor], Any]  # of a batch's outputs and targets
OWN = "own "  # before a metric's name: its sum


class WithOwnParts(Objective):
    """An objective that takes a user's loss and metrics.

    loss     returns the mean loss of a batch
    metrics  by name, or by `fedhm.Metric`: returns a number for each sample, or their mean
    """

    # left out where they are empty: runs without own parts have the settings that they always had
    own_loss: Annotated[str, Field(exclude_if=is_empty)] = ""
    own_metrics: Annotated[tuple[Metric, ...], Field(exclude_if=is_empty)] = ()
    main_metric: Annotated[str, Field(exclude_if=is_empty)] = ""  # that tables and plots show; empty: the objective's
    _loss: Function | None = PrivateAttr(None)
    _functions: dict[str, Function] = PrivateAttr(default_factory=dict)

    def __init__(
        self, *, loss: Function | None = None, metrics: Mapping[str | Metric, Function] | None = None, **settings: Any
    ) -> None:
        functions: dict[str, Function] = {}
        if loss is not None:
            settings["own_loss"] = _name(loss, "loss")
        if metrics is not None:
            if not isinstance(metrics, Mapping):
                raise FedhmError("metrics must be functions by name: metrics={'top5': top5}")
            known = [key if isinstance(key, Metric) else Metric(str(key)) for key in metrics]
            functions = {each.name: given for each, given in zip(known, metrics.values(), strict=True)}
            for name, function in functions.items():
                _name(function, f"metric '{name}'")
            settings["own_metrics"] = tuple(known)
        super().__init__(**settings)
        self._loss, self._functions = loss, functions
        names = [metric.name for metric in (*type(self).metrics, *self.own_metrics)]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise FedhmError(f"the metric '{twice}' is there already: give yours another name")
        if self.main_metric and self.main_metric not in names:
            raise FedhmError(f"main_metric = '{self.main_metric}' is none of {', '.join(names)}")

    @property
    def reported(self) -> tuple[Metric, ...]:
        found = (*super().reported, *self.own_metrics)
        return tuple(sorted(found, key=lambda metric: metric.name != self.main_metric)) if self.main_metric else found

    @property
    def measurable(self) -> bool:
        named = {metric.name for metric in self.own_metrics}
        return named <= self._functions.keys() and (not self.own_loss or self._loss is not None)

    @property
    def loss_bound(self) -> float | None:
        return None if self.own_loss else super().loss_bound

    def sum_bound(self, name: str) -> tuple[float, float] | None:
        return None if self.own_loss and name in ("loss", f"{OWN}loss") else super().sum_bound(name)

    def mean_loss(self, output: Tensor, targets: Tensor) -> Tensor | None:
        """Return the user's loss of a batch; None: the objective's own counts."""
        if not self.own_loss:
            return None
        if self._loss is None:
            raise FedhmError(_elsewhere(f"loss '{self.own_loss}'"))
        found = self._loss(output, targets)
        if not isinstance(found, Tensor) or found.ndim:
            raise FedhmError(f"the loss '{self.own_loss}' must return one number, the mean over the batch")
        return found

    def own_sums(self, output: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the sums of the user's metrics over a batch."""
        found: dict[str, Tensor] = {}
        for metric in self.own_metrics:
            if metric.name not in self._functions:
                raise FedhmError(_elsewhere(f"metric '{metric.name}'"))
            try:
                value = torch.as_tensor(self._functions[metric.name](output, targets), device=output.device)
            except Exception as error:  # a user's function may raise anything
                raise FedhmError(f"the metric '{metric.name}' cannot be computed: {error!r}") from error
            if value.ndim and len(value) != len(targets):
                raise FedhmError(f"the metric '{metric.name}' must return a number for each sample, or their mean")
            value = value.double()
            found[f"{OWN}{metric.name}"] = (
                value.flatten(1).mean(1).sum()
                if value.ndim > 1
                else (value.sum() if value.ndim else value * len(targets))
            )
        return found

    def own_results(self, sums: Mapping[str, Tensor], samples: int) -> dict[str, float]:
        return {metric.name: sums[f"{OWN}{metric.name}"].item() / samples for metric in self.own_metrics}


def _name(function: Any, what: str) -> str:
    if not callable(function):
        raise FedhmError(f"the {what} must be a function of outputs and targets, not a {type(function).__name__}")
    return str(getattr(function, "__name__", type(function).__name__))


def _elsewhere(what: str) -> str:
    return f"the {what} is a function of the Python program that began the run: run or resume it there"
