"""FedMD: every client has its own model, which never travels; only logits on public inputs do.

tasks    a participant gets the consensus of the last round. It trains its model f_p towards it, by SGD on
         mean |f_p(x) − consensus| over the public inputs x; then on its own samples; and sends its logits f_p(x)
merge    consensus ← mean over the participants of f_p(x)

A tier is a width. For evaluation, its model is that of its client that took part last; of several, the one with the
lowest number. The server of a simulation keeps the clients' models for them, so its state grows with the number of
clients.

In the published method, all clients first train on the labelled public samples. Here public samples have no labels, and
a client starts with its own samples.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedhm.config.method import PAPER_WIDTHS, Family, MethodConfig, NamedEntry, matched_widths
from fedhm.config.section import Positive, Ratios
from fedhm.errors import FedhmError
from fedhm.methods.method import Method, Setup, State
from fedhm.methods.sliced import WidthSlices
from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.work.distil import CONSENSUS, LOGITS
from fedhm.work.messages import Participant, Task, TaskOptions, Update


class FedMDConfig(MethodConfig):
    name: Literal["fedmd"] = "fedmd"
    needs_public: ClassVar[bool] = True
    weighs_clients: ClassVar[bool] = False
    tiers: Ratios = PAPER_WIDTHS  # widths; every client has its own model
    digest_epochs: Positive = 1  # over the public samples, towards the consensus
    digest_lr: Annotated[float, Field(gt=0)] = 0.1  # of absolute errors, whose gradients are small

    def build(self, model: nn.Module, setup: Setup) -> "FedMD":
        return FedMD(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return matched_widths("fedmd")

    @property
    def shares(self) -> Sequence[float]:
        return self.tiers


@dataclass(frozen=True)
class FedMDState(State):
    initial: Tensors  # of the full model, for clients that are yet to take part
    consensus: Tensor | None = None
    kept: dict[int, Tensors] = field(default_factory=dict)  # by client, its own model
    newest: dict[str, int] = field(default_factory=dict)  # by tier, the client that took part last
    averaged: ClassVar[tuple[str, ...]] = ()  # logits, no weights


class FedMD(Method[FedMDState]):
    state_type = FedMDState

    def __init__(self, model: nn.Module, config: FedMDConfig, setup: Setup) -> None:
        if not setup.fixed:
            raise FedhmError(
                "in fedmd every client keeps a model of its own, of its tier's width: "
                "federation.heterogeneity must be 'fixed'"
            )
        self.config = config
        self.slices = WidthSlices(model, config.tiers, setup)
        self.tiers, self.levels = self.slices.tiers, self.slices.levels

    def start(self, weights: Tensors) -> FedMDState:
        return FedMDState(weights)

    def tasks(self, state: FedMDState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        agreed = {} if state.consensus is None else {CONSENSUS: state.consensus}
        options = TaskOptions(digest_epochs=self.config.digest_epochs, digest_lr=self.config.digest_lr)
        for p in participants:
            kept = state.kept.get(p.client) or self._initial(state, p.tier)
            yield Task("distil", round_number, p.client, p.tier, self.spec(p.tier), agreed, kept, options)

    def merge(self, state: FedMDState, updates: Iterable[Update], round_number: int) -> FedMDState:
        total, count = torch.zeros(()), 0
        kept, newest = dict(state.kept), dict[str, int]()
        for update in updates:
            total, count = total + update.tensors[LOGITS], count + 1
            kept[update.client] = update.kept
            newest[update.tier] = min(update.client, newest.get(update.tier, update.client))
        consensus = total / count if count else state.consensus
        return FedMDState(state.initial, consensus, kept, state.newest | newest)

    def network(self, spec: NetworkSpec) -> nn.Module:
        return self.slices.network(spec)

    def weights(self, state: FedMDState, tier: str) -> Tensors:
        return state.kept[state.newest[tier]] if tier in state.newest else self._initial(state, tier)

    def _initial(self, state: FedMDState, tier: str) -> Tensors:
        """Return a tier's model before its first client has taken part."""
        return self.slices.rescale_init(self.slices.slice_weights(state.initial, tier), tier)


ENTRY_POINT = FedMDConfig
