"""HeteroFL: every tier trains the first channels of the full model; a number is averaged over those who hold it.

W[i] ← Σ αₚ Wₚ[i] / Σ αₚ    over the participants p whose width reaches i; what nobody holds keeps its value
"""

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from fedhm.config.method import HeteroFLConfig
from fedhm.methods.method import Setup, State
from fedhm.methods.sliced import Slices
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Participant, Task, Update


class HeteroFL:
    def __init__(self, model: nn.Module, config: HeteroFLConfig, setup: Setup) -> None:
        self.config = config
        self.slices = Slices(model, config.tiers, setup, scaler=config.scaler)
        self.tiers, self.levels = self.slices.tiers, self.slices.levels

    def start(self, weights: Tensors) -> State:
        return State(weights)

    def tasks(self, state: State, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        return self.slices.tasks(state.weights, participants, round_number)

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        return State(self.slices.merged(state.weights, updates, self.config.weighting))

    def network(self, name: str) -> nn.Module:
        return self.slices.network(name)

    def weights(self, state: State, tier: str) -> Tensors:
        return self.slices.take(state.weights, tier)
