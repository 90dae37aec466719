"""FedRolex: like HeteroFL, but the window of channels moves in every round, so that all are trained equally often.

In round t, the i-th channel of a narrow layer is channel ((t − 1) · roll + i) mod C of the full one. The window moves
over the full model, even if no tier trains all of it. So for the scaler, too, widths are shares of the full model.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from fedhm.config.method import PAPER_WIDTHS, Family, MethodConfig, NamedEntry, matched_widths
from fedhm.config.section import Ratios
from fedhm.methods.method import Method, Setup, State
from fedhm.methods.sliced import WidthSlices
from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Participant, Task, Update


class FedRolexConfig(MethodConfig):
    name: Literal["fedrolex"] = "fedrolex"
    weighting: Literal["uniform", "samples"] = "uniform"
    tiers: Ratios = PAPER_WIDTHS  # widths
    roll: Annotated[int, Field(ge=0)] = 1  # channels by which the window moves each round
    scaler: bool = True  # divide activations by the width, if no normalisation follows

    def build(self, model: nn.Module, setup: Setup) -> "FedRolex":
        return FedRolex(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return matched_widths("fedrolex")

    def clip_norm(self, lr: float) -> float:
        return 1.0  # as in its authors' code

    @property
    def shares(self) -> Sequence[float]:
        return self.tiers


@dataclass(frozen=True)
class FedRolexState(State):
    weights: Tensors
    trained: int = 0  # the last round that was merged; its window is evaluated


class FedRolex(Method[FedRolexState]):
    state_type = FedRolexState

    def __init__(self, model: nn.Module, config: FedRolexConfig, setup: Setup) -> None:
        self.config = config
        self.slices = WidthSlices(model, config.tiers, setup, scaled_to=1.0 if config.scaler else None)
        self.tiers, self.levels = self.slices.tiers, self.slices.levels

    def start(self, weights: Tensors) -> FedRolexState:
        return FedRolexState(weights)

    def tasks(self, state: FedRolexState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        return self.slices.tasks(state.weights, participants, round_number, self._offset(round_number))

    def merge(self, state: FedRolexState, updates: Iterable[Update], round_number: int) -> FedRolexState:
        offset = self._offset(round_number)
        return FedRolexState(self.slices.merge(state.weights, updates, self.config.weighting, offset), round_number)

    def network(self, spec: NetworkSpec) -> nn.Module:
        return self.slices.network(spec)

    def weights(self, state: FedRolexState, tier: str) -> Tensors:
        """Return the weights of a tier in the window that was trained last."""
        own = self.slices.slice_weights(state.weights, tier, self._offset(max(1, state.trained)))
        return self.slices.deployed_weights(own, tier)

    def _offset(self, round_number: int) -> int:
        return (round_number - 1) * self.config.roll


ENTRY_POINT = FedRolexConfig
