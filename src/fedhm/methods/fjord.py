"""FjORD: ordered dropout. A client trains its tier's width, but every batch runs at a width drawn from those up to it.

So the first channels learn to work without the later ones, and every tier's network is inside the larger ones. Each
number is averaged over the clients that have it, as in HeteroFL. With `distil`, the client's own width runs in every
batch too, and the drawn width learns from its outputs instead of the labels (`widths/wrappers.py`; the paper's
α = T = 1).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from torch import nn

from fedhm.config.method import PAPER_WIDTHS, Family, MethodConfig, NamedEntry, matched_widths
from fedhm.config.section import Ratios
from fedhm.methods.method import Method, ModelState, Setup
from fedhm.methods.sliced import WidthSlices
from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.widths.wrappers import OrderedDropout
from fedhm.work.messages import Participant, Task, Update

INSIDE = "network."  # prefix of the tensors inside `OrderedDropout`


class FjORDConfig(MethodConfig):
    name: Literal["fjord"] = "fjord"
    weighting: Literal["uniform", "samples"] = "uniform"
    tiers: Ratios = PAPER_WIDTHS  # widths
    distil: bool = False  # from the client's own width to the drawn one; without it is the published default

    def build(self, model: nn.Module, setup: Setup) -> "FjORD":
        return FjORD(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        distilling = NamedEntry("fjord-distil", lambda s: {"name": "fjord", "tiers": s.widths, "distil": True})
        return [*matched_widths("fjord"), distilling]

    @property
    def shares(self) -> Sequence[float]:
        return self.tiers


class FjORD(Method[ModelState]):
    def __init__(self, model: nn.Module, config: FjORDConfig, setup: Setup) -> None:
        self.config = config
        self._divergence = setup.objective.divergence if config.distil else None
        self.slices = WidthSlices(model, config.tiers, setup)
        self.tiers, self.levels = self.slices.tiers, self.slices.levels

    def start(self, weights: Tensors) -> ModelState:
        return ModelState(self.slices.rescale_init(weights, self.tiers[0]))

    def tasks(self, state: ModelState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for task in self.slices.tasks(state.weights, participants, round_number):
            inside = {f"{INSIDE}{name}": tensor for name, tensor in task.tensors.items()}
            yield replace(task, network=NetworkSpec(task.tier, f"ordered {task.tier}", "ordered"), tensors=inside)

    def merge(self, state: ModelState, updates: Iterable[Update], round_number: int) -> ModelState:
        outside = (replace(u, tensors={n.removeprefix(INSIDE): t for n, t in u.tensors.items()}) for u in updates)
        return ModelState(self.slices.merge(state.weights, outside, self.config.weighting))

    def network(self, spec: NetworkSpec) -> nn.Module:
        network = self.slices.network(self.spec(spec.tier))
        if spec.variant != "ordered":
            return network
        smaller = self.tiers[self.tiers.index(spec.tier) + 1 :]
        narrower = [self.slices.network(self.spec(small)) for small in smaller]
        return OrderedDropout(network, narrower, self._divergence)

    def weights(self, state: ModelState, tier: str) -> Tensors:
        return self.slices.slice_weights(state.weights, tier)


ENTRY_POINT = FjORDConfig
