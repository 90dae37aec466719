"""Width-slimmed FedAvg: the same narrower network for everybody. The paper's FedAvg is that of the smallest width."""

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from fedhm.messages import Participant, Task, Tensors, Update
from fedhm.method_config import SlimmedConfig
from fedhm.methods.mean import average
from fedhm.methods.method import Setup, State
from fedhm.methods.sliced import Slices


class Slimmed:
    def __init__(self, model: nn.Module, config: SlimmedConfig, setup: Setup) -> None:
        self.config = config
        self.slices = Slices(model, (config.width,), setup)
        self.tiers, self.levels = self.slices.tiers, self.slices.levels
        self._classifier = setup.classifier

    def start(self, weights: Tensors) -> State:
        return State(self.slices.own_scale(self.slices.take(weights, self.tiers[0]), self.tiers[0]))

    def tasks(self, state: State, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for p in participants:
            yield Task("train", round_number, p.client, p.tier, p.tier, state.weights)

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        return State(average(state.weights, updates, self.config.weighting, self._classifier))

    def network(self, name: str) -> nn.Module:
        return self.slices.network(name)

    def weights(self, state: State, tier: str) -> Tensors:  # noqa: ARG002
        return state.weights
