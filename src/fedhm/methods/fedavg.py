"""FedAvg: one network for all clients, averaged tensor by tensor.

The network is the full model, or its hybrid network at one rank ratio. In a hybrid network, the factors are averaged.
"""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from fedhm.config.method import STABLE_STEP, MethodConfig, only_uniform
from fedhm.config.section import Ratio, tier_name
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.methods.means import average
from fedhm.methods.method import Homogeneous, ModelState, Setup
from fedhm.methods.plans import ratio_plan
from fedhm.networks.exchange import Tensors, exchanged_tensors, load
from fedhm.work.messages import Update


class FedAvgConfig(MethodConfig):
    name: Literal["fedavg"] = "fedavg"
    by_coordinate: ClassVar[bool] = True
    weighting: Literal["uniform", "samples"] = "uniform"
    tier: Ratio = 1.0  # one network for all clients: the full one, or its hybrid network at this ratio
    keep: Annotated[int, Field(ge=0)] = 1

    def build(self, model: nn.Module, setup: Setup) -> "FedAvg":
        return FedAvg(model, self, setup)

    def clip_norm(self, lr: float) -> float:
        return 0.0 if self.is_full_model else STABLE_STEP / lr

    @property
    def unbounded(self) -> str:
        return only_uniform(self.weighting)

    @property
    def is_full_model(self) -> bool:
        return self.tier == 1


class FedAvg(Homogeneous):
    def __init__(self, model: nn.Module, config: FedAvgConfig, setup: Setup = Setup()) -> None:
        super().__init__(tier_name(config.tier))
        self.config = config
        self.plan = ratio_plan(model, config.tier, config.keep, setup.output_layers)
        self._model = model
        self._classifiers, self._make_mean = setup.output_layers, setup.make_mean

    def start(self, weights: Tensors) -> ModelState:
        model = load(to_hybrid(self._model, {}), weights)
        return ModelState({name: t.clone() for name, t in exchanged_tensors(to_hybrid(model, self.plan)).items()})

    def merge(self, state: ModelState, updates: Iterable[Update], round_number: int) -> ModelState:
        return ModelState(average(state.weights, updates, self.config.weighting, self._classifiers, self._make_mean))

    def build(self) -> nn.Module:
        return to_hybrid(self._model, self.plan, spectral=False)


ENTRY_POINT = FedAvgConfig
