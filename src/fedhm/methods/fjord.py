"""FjORD: ordered dropout. A client trains its tier's width, but every batch runs at a width drawn from those up to it.

The first channels thus learn to do without the later ones, and every tier's network is inside the larger ones.
Numbers are averaged over those who hold them, as in HeteroFL. (FjORD's option to distil from the client's widest to
its narrower networks is not in here.)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from fedhm.config.method_config import PAPER_WIDTHS, Family, MethodConfig, NamedEntry, matched_widths
from fedhm.config.section import Ratios
from fedhm.methods.method import Method, ModelState, Setup
from fedhm.methods.sliced import Slices
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Participant, Task, Update

ORDERED = "ordered "  # before a tier: its network as it is trained
INSIDE = "network."  # where `OrderedDropout` holds it


class OrderedDropout(nn.Module):
    """`network` in evaluation; in training, for each batch, one of `narrower` with the leading weights of `network`."""

    def __init__(self, network: nn.Module, narrower: Sequence[nn.Module]) -> None:
        super().__init__()
        self.network = network
        self._narrower = list(narrower)  # a plain list: they have no weights of their own

    @property
    def drawn(self) -> Sequence[nn.Module]:
        """Return the networks of which each batch runs one, all equally often; the widest first."""
        return [self.network, *self._narrower]

    def forward(self, x: Tensor) -> Tensor:
        drawn = int(torch.randint(len(self._narrower) + 1, ())) if self.training else 0
        logits: Tensor
        if drawn == 0:
            logits = self.network(x)
        else:
            chosen = self._narrower[drawn - 1].train()
            own = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
            shapes = {n: t.shape for n, t in (*chosen.named_parameters(), *chosen.named_buffers())}
            leading = {name: own[name][tuple(slice(size) for size in shape)] for name, shape in shapes.items()}
            logits = torch.func.functional_call(chosen, leading, (x,))
        return logits


class FjORDConfig(MethodConfig):
    name: Literal["fjord"] = "fjord"
    weighting: Literal["uniform", "samples"] = "uniform"
    tiers: Ratios = PAPER_WIDTHS  # widths

    def build(self, model: nn.Module, setup: Setup) -> "FjORD":
        return FjORD(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return matched_widths("fjord")

    @property
    def shares(self) -> Sequence[float]:
        return self.tiers


class FjORD(Method[ModelState]):
    def __init__(self, model: nn.Module, config: FjORDConfig, setup: Setup) -> None:
        self.config = config
        self.slices = Slices(model, config.tiers, setup)
        self.tiers, self.levels = self.slices.tiers, self.slices.levels

    def start(self, weights: Tensors) -> ModelState:
        return ModelState(self.slices.own_scale(weights, self.tiers[0]))

    def tasks(self, state: ModelState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for task in self.slices.tasks(state.weights, participants, round_number):
            inside = {f"{INSIDE}{name}": tensor for name, tensor in task.tensors.items()}
            yield replace(task, network=f"{ORDERED}{task.tier}", tensors=inside)

    def merge(self, state: ModelState, updates: Iterable[Update], round_number: int) -> ModelState:
        outside = (replace(u, tensors={n.removeprefix(INSIDE): t for n, t in u.tensors.items()}) for u in updates)
        return ModelState(self.slices.merged(state.weights, outside, self.config.weighting))

    def network(self, name: str) -> nn.Module:
        if name in self.tiers:
            return self.slices.network(name)
        tier = name.removeprefix(ORDERED)
        smaller = self.tiers[self.tiers.index(tier) + 1 :]
        return OrderedDropout(self.slices.network(tier), [self.slices.network(small) for small in smaller])

    def weights(self, state: ModelState, tier: str) -> Tensors:
        return self.slices.take(state.weights, tier)


ENTRY_POINT = FjORDConfig
