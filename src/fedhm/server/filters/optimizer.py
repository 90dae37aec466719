"""The server's optimizer, `[server] optimizer`: a round's mean is the direction of a step, not the new model itself.

With x the weights before the round, and Δ = mean − x the round's pseudo-gradient,

    momentum   m ← β m + Δ                             x ← x + η m               FedAvgM (Hsu et al. 2019)
    adam       m ← β₁ m + (1 − β₁) Δ
               v ← β₂ v + (1 − β₂) Δ²                  x ← x + η m / (√v + τ)    FedAdam (Reddi et al. 2021)

m starts at 0, v at τ². Running averages, other buffers and frozen parameters are not weights: no step is made on them,
and their mean is taken as it is.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedhm.config.schema import ServerConfig
from fedhm.errors import FedhmError
from fedhm.networks.exchange import Tensors, is_averageable
from fedhm.server.filters.filter import RoundFilter
from fedhm.server.record import Record
from fedhm.server.state import TensorPath, map_tensors

S = TypeVar("S")


@dataclass(frozen=True)
class Moments:
    """The moving averages that an optimizer keeps between rounds, by the names of tensors in the method's state."""

    first: Tensors = field(default_factory=dict)
    second: Tensors = field(default_factory=dict)


class ServerOptimizer(RoundFilter):
    """The filter of the server's optimizer. It steps on the fields of a method's state that the method averages.

    not_weights  names of tensors that are not stepped on
    always       step even if no client trained, since noise has changed the state (`[privacy]` at the server)
    """

    def __init__(
        self, config: ServerConfig, method: str, averaged: tuple[str, ...], not_weights: Set[str], always: bool = False
    ) -> None:
        self.config, self._averaged, self._not_weights, self._always = config, averaged, not_weights, always
        self.moments = Moments()  # of the last round; a checkpoint holds them
        if config.optimizer != "none" and not averaged:
            raise FedhmError(f"{method} averages no weights: server.optimizer must be 'none'")

    def merged(self, before: S, merged: S, record: Record) -> S:
        if self.config.optimizer == "none" or not (record.traffic or self._always):
            return merged
        stepped, self.moments = self.step(before, merged, self.moments)
        return stepped

    def step(self, before: S, merged: S, moments: Moments) -> tuple[S, Moments]:
        """Return the state whose averaged fields have made the step from `before` that `merged` points to."""
        if self.config.optimizer == "none":
            return merged, moments
        first, second, old = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        map_tensors(self._fields(before), lambda name, _, tensor: old.setdefault(name, tensor))

        def stepped_tensor(name: str, path: TensorPath, mean: Tensor) -> Tensor:
            if path[-1] in self._not_weights or not is_averageable(mean):
                return mean
            if mean.is_complex():  # real and imaginary parts are two numbers, as in torch's own optimizers
                return torch.view_as_complex(step_of(name, torch.view_as_real(mean), torch.view_as_real(old[name])))
            return step_of(name, mean, old[name])

        def step_of(name: str, mean: Tensor, before: Tensor) -> Tensor:
            change = mean - before
            if self.config.optimizer == "momentum":
                first[name] = momentum(change, moments.first.get(name), self.config.momentum)
                return before + self.config.learning_rate * first[name]
            first[name], second[name] = adam(change, moments.first.get(name), moments.second.get(name), self.config)
            return before + self.config.learning_rate * first[name] / (second[name].sqrt() + self.config.tau)

        stepped: Any = map_tensors(self._fields(merged), stepped_tensor)
        return replace(merged, **stepped), Moments(first, second)  # type: ignore[type-var]

    def _fields(self, state: Any) -> dict[str, Any]:
        return {name: getattr(state, name) for name in self._averaged}


def momentum(change: Tensor, first: Tensor | None, beta: float) -> Tensor:
    return change if first is None else beta * first + change


def adam(change: Tensor, first: Tensor | None, second: Tensor | None, config: ServerConfig) -> tuple[Tensor, Tensor]:
    beta_1, beta_2 = config.betas
    first = torch.zeros_like(change) if first is None else first
    second = torch.full_like(change, config.tau**2) if second is None else second
    return beta_1 * first + (1 - beta_1) * change, beta_2 * second + (1 - beta_2) * change.square()
