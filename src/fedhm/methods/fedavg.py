"""FedAvg: one network for everybody, averaged tensor by tensor.

The network is the full model, or its hybrid network at one rank ratio; then the factors themselves are averaged.
"""

from collections.abc import Iterable

from torch import nn

from fedhm.config.method import FedAvgConfig, tier_name
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.methods.homogeneous import Homogeneous
from fedhm.methods.mean import average
from fedhm.methods.method import Setup, State
from fedhm.methods.tier_plan import tier_plan
from fedhm.networks.exchange import Tensors, exchanged, load
from fedhm.work.messages import Update


class FedAvg(Homogeneous):
    def __init__(self, model: nn.Module, config: FedAvgConfig, setup: Setup = Setup()) -> None:
        super().__init__(tier_name(config.tier))
        self.config = config
        self.plan = tier_plan(model, config.tier, config.keep, setup.classifier)
        self._model = model
        self._classifier = setup.classifier

    def start(self, weights: Tensors) -> State:
        model = load(to_hybrid(self._model, {}), weights)
        return State({name: t.clone() for name, t in exchanged(to_hybrid(model, self.plan)).items()})

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        return State(average(state.weights, updates, self.config.weighting, self._classifier))

    def build(self) -> nn.Module:
        return to_hybrid(self._model, self.plan, spectral=False)
