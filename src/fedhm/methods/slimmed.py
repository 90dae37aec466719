"""Width-slimmed FedAvg: the same narrower network for everybody. The paper's FedAvg is that of the smallest width."""

from collections.abc import Iterable

from torch import nn

from fedhm.config.method import SlimmedConfig, width_name
from fedhm.methods.homogeneous import Homogeneous
from fedhm.methods.mean import average
from fedhm.methods.method import Setup, State
from fedhm.methods.sliced import Slices
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Update


class Slimmed(Homogeneous):
    def __init__(self, model: nn.Module, config: SlimmedConfig, setup: Setup) -> None:
        super().__init__(width_name(config.width))
        self.config = config
        self.slices = Slices(model, (config.width,), setup)
        self._classifier = setup.classifier

    def start(self, weights: Tensors) -> State:
        return State(self.slices.own_scale(self.slices.take(weights, self.tier), self.tier))

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        return State(average(state.weights, updates, self.config.weighting, self._classifier))

    def build(self) -> nn.Module:
        return self.slices.network(self.tier)
