"""FedRolex: as HeteroFL, but the window of channels moves on every round, so that all are trained equally often.

In round t the i-th channel of a narrow layer is channel ((t − 1) · roll + i) mod C of the full one.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from fedhm.config.method import FedRolexConfig
from fedhm.methods.method import Setup, State
from fedhm.methods.sliced import Slices
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Participant, Task, Update


class FedRolex:
    def __init__(self, model: nn.Module, config: FedRolexConfig, setup: Setup) -> None:
        self.config = config
        self.slices = Slices(model, config.tiers, setup)
        self.tiers, self.levels = self.slices.tiers, self.slices.levels

    def start(self, weights: Tensors) -> State:
        return State(weights, {"round": torch.tensor(1)})

    def tasks(self, state: State, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        return self.slices.tasks(state.weights, participants, round_number, self._offset(round_number))

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """The state knows the number of the coming round, and so where the window of this one was."""
        coming = state.memory["round"]
        weights = self.slices.merged(state.weights, updates, self.config.weighting, self._offset(int(coming)))
        return State(weights, {"round": coming + 1})

    def network(self, name: str) -> nn.Module:
        return self.slices.network(name)

    def weights(self, state: State, tier: str) -> Tensors:
        """The window that was trained last."""
        last = max(1, int(state.memory["round"]) - 1)
        return self.slices.take(state.weights, tier, self._offset(last))

    def _offset(self, round_number: int) -> int:
        return (round_number - 1) * self.config.roll
