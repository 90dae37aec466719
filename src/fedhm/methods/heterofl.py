"""HeteroFL: every tier trains the first channels of the full model; a number is averaged over the clients that have it.

W[i] ← Σ αₚ Wₚ[i] / Σ αₚ    over the participants p whose width reaches i; other numbers keep their values

The largest tier is the whole model: it starts like a network of its width, and has no scaler.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

from torch import nn

from fedhm.config.method import (
    PAPER_WIDTHS,
    Family,
    MethodConfig,
    NamedEntry,
    Settings,
    Sizes,
    matched_widths,
    replace_largest,
)
from fedhm.config.section import Ratios
from fedhm.methods.method import Method, ModelState, Setup
from fedhm.methods.sliced import WidthSlices
from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Participant, Task, Update


class HeteroFLConfig(MethodConfig):
    name: Literal["heterofl"] = "heterofl"
    weighting: Literal["uniform", "samples"] = "uniform"
    tiers: Ratios = PAPER_WIDTHS  # widths
    scaler: bool = True  # divide activations by the share of the largest width, if no normalisation follows

    def build(self, model: nn.Module, setup: Setup) -> "HeteroFL":
        return HeteroFL(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [
            *matched_widths("heterofl"),
            *(NamedEntry(f"heterofl-v{count + 1}", partial(_with_largest_replaced, count)) for count in (1, 2)),
        ]

    def clip_norm(self, lr: float) -> float:
        return 1.0  # as in its authors' code

    @property
    def shares(self) -> Sequence[float]:
        return self.tiers


def _with_largest_replaced(count: int, sizes: Sizes) -> Settings:
    return {"name": "heterofl", "tiers": replace_largest(sizes.widths, count, f"heterofl-v{count + 1}")}


class HeteroFL(Method[ModelState]):
    def __init__(self, model: nn.Module, config: HeteroFLConfig, setup: Setup) -> None:
        self.config = config
        self.slices = WidthSlices(model, config.tiers, setup, scaled_to=max(config.tiers) if config.scaler else None)
        self.tiers, self.levels = self.slices.tiers, self.slices.levels

    def start(self, weights: Tensors) -> ModelState:
        return ModelState(self.slices.rescale_init(weights, self.tiers[0]))

    def tasks(self, state: ModelState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        return self.slices.tasks(state.weights, participants, round_number)

    def merge(self, state: ModelState, updates: Iterable[Update], round_number: int) -> ModelState:
        return ModelState(self.slices.merge(state.weights, updates, self.config.weighting))

    def network(self, spec: NetworkSpec) -> nn.Module:
        return self.slices.network(spec)

    def weights(self, state: ModelState, tier: str) -> Tensors:
        return self.slices.deployed_weights(self.slices.slice_weights(state.weights, tier), tier)


ENTRY_POINT = HeteroFLConfig
