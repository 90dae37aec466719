"""FedAvg: one network for everybody, averaged tensor by tensor.

The network is the full model, or its hybrid network at one rank ratio; then the factors themselves are averaged.
"""

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from fedhm.errors import FedhmError
from fedhm.exchange import exchanged, load
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.messages import Participant, Task, Tensors, Update
from fedhm.method_config import FedAvgConfig, tier_name
from fedhm.methods.mean import average
from fedhm.methods.method import Setup, State
from fedhm.methods.tier_plan import tier_plan


class FedAvg:
    def __init__(self, model: nn.Module, config: FedAvgConfig, setup: Setup = Setup()) -> None:
        self.config = config
        self.tier = tier_name(config.tier)
        self.plan = tier_plan(model, config.tier, config.keep, setup.classifier)
        self._model = model
        self._classifier = setup.classifier

    @property
    def tiers(self) -> Sequence[str]:
        return (self.tier,)

    @property
    def levels(self) -> Sequence[str]:
        return (self.tier,)

    def start(self, weights: Tensors) -> State:
        model = load(to_hybrid(self._model, {}), weights)
        return State({name: t.clone() for name, t in exchanged(to_hybrid(model, self.plan)).items()})

    def tasks(self, state: State, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for p in participants:
            yield Task("train", round_number, p.client, p.tier, self.tier, state.weights)

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        return State(average(state.weights, updates, self.config.weighting, self._classifier))

    def network(self, name: str) -> nn.Module:
        if name != self.tier:
            raise FedhmError(f"FedAvg has one network, '{self.tier}', not '{name}'")
        return to_hybrid(self._model, self.plan, spectral=False)

    def weights(self, state: State, tier: str) -> Tensors:  # noqa: ARG002
        return state.weights
