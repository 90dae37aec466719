"""FedAvg of the full model among the clients that can train it; all others are left out.

This is what a mixed fleet does without a method for it. Clients of smaller tiers are sampled like the others, but get
no task. If no participant can train the full model, it stays as it is.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator
from torch import nn

from fedhm.config.method import Family, MethodConfig, NamedEntry, only_uniform
from fedhm.config.section import Ratios, tier_name
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.methods.means import average
from fedhm.methods.method import Homogeneous, ModelState, Setup
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Participant, Task, Update

FULL = tier_name(1)


def _somebody_is_capable(ratios: tuple[float, ...]) -> tuple[float, ...]:
    if 1 not in ratios:
        raise ValueError("one of them must be 1, since nobody else trains")
    return ratios


class CapableConfig(MethodConfig):
    name: Literal["capable"] = "capable"
    by_coordinate: ClassVar[bool] = True
    weighting: Literal["uniform", "samples"] = "uniform"
    tiers: Annotated[Ratios, AfterValidator(_somebody_is_capable)] = (1.0, 1 / 2, 1 / 4, 1 / 8)  # of the clients

    def build(self, model: nn.Module, setup: Setup) -> "Capable":
        return Capable(model, self, setup)

    @property
    def unbounded(self) -> str:
        return only_uniform(self.weighting)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [NamedEntry("capable", lambda sizes: {"name": "capable", "tiers": sizes.ratios})]

    @property
    def shares(self) -> Sequence[float]:
        return self.tiers

    @property
    def rank_ratios(self) -> Sequence[float]:
        return self.tiers


class Capable(Homogeneous):
    """FedAvg among the clients of one capability level; the other levels have no network."""

    def __init__(self, model: nn.Module, config: CapableConfig, setup: Setup = Setup()) -> None:
        super().__init__(FULL)
        self.levels = tuple(tier_name(ratio) for ratio in sorted(config.tiers, reverse=True))
        self.config = config
        self._model, self._classifiers, self._make_mean = model, setup.output_layers, setup.make_mean

    def start(self, weights: Tensors) -> ModelState:
        return ModelState(weights)

    def tasks(self, state: ModelState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        return super().tasks(state, [p for p in participants if p.tier == FULL], round_number)

    def merge(self, state: ModelState, updates: Iterable[Update], round_number: int) -> ModelState:
        return ModelState(average(state.weights, updates, self.config.weighting, self._classifiers, self._make_mean))

    def build(self) -> nn.Module:
        return to_hybrid(self._model, {})


ENTRY_POINT = CapableConfig
