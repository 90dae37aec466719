"""FedSA-LoRA: A is shared and averaged, every client keeps its own B and head (Guo et al. 2024).

For evaluation, the model has the B and head of the client that took part last; of several, the one with the lowest
number. The server of a simulation keeps the clients' parts for them, so its state grows with the number of clients.
With `share_head`, the head is averaged, as in the other methods.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from fedhm.config.method import Family, NamedEntry
from fedhm.methods.adapting import RankConfig, adapter_tensors, initial_adapters, smallest_rank_settings
from fedhm.methods.means import WeightedMean, client_weight
from fedhm.methods.method import Method, Setup, State
from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Participant, Task, Update

SHARED, OWN = "a", "b"  # after a layer's name: its A and its B


class FedSAConfig(RankConfig):
    name: Literal["fedsa"] = "fedsa"
    share_head: bool = False  # the head is averaged, too; without, every client keeps its own

    def build(self, model: nn.Module, setup: Setup) -> "FedSA":
        return FedSA(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [
            NamedEntry("fedsa", lambda sizes: smallest_rank_settings("fedsa", sizes.adapters)),
            NamedEntry(
                "fedsa-head", lambda sizes: {**smallest_rank_settings("fedsa", sizes.adapters), "share_head": True}
            ),
        ]

    @property
    def remark(self) -> str:
        return "averages the head" if self.share_head else ""


@dataclass(frozen=True)
class FedSAState(State):
    weights: Tensors  # A of all layers, and the head if it is shared
    begin: Tensors  # B and head of a client that has not taken part yet
    kept: dict[int, Tensors] = field(default_factory=dict)  # by client, its own
    newest: int = -1  # the client that took part last


class FedSA(Method[FedSAState]):
    state_type = FedSAState

    def __init__(self, model: nn.Module, config: FedSAConfig, setup: Setup = Setup()) -> None:
        self.config, self._setup, self.base = config, setup, config.base(model, setup)
        self.base.check_rank(config.rank)
        self.tiers = self.levels = (config.tier,)

    def start(self, weights: Tensors) -> FedSAState:
        sent = adapter_tensors(
            initial_adapters(self.base, self.config.rank, self._setup.seed), self.config.rank, self.base.shapes
        )
        shared = {f"{name[:-2]}.{SHARED}": tensor for name, tensor in sent.items() if name.endswith(".u")}
        own = {f"{name[:-2]}.{OWN}": tensor for name, tensor in sent.items() if name.endswith(".v")}
        head = self.base.head_of(weights)
        return FedSAState(head | shared, own) if self.config.share_head else FedSAState(shared, own | head)

    def tasks(self, state: FedSAState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for p in participants:
            kept = state.kept.get(p.client, state.begin)
            yield Task("adapt", round_number, p.client, p.tier, self.spec(self.tiers[0]), state.weights, kept)

    def merge(self, state: FedSAState, updates: Iterable[Update], round_number: int) -> FedSAState:
        mean, kept, took_part = WeightedMean(state.weights), dict(state.kept), list[int]()
        for update in updates:
            mean.add_all(update, client_weight(update, self.config.weighting), self._setup.output_layers)
            kept[update.client] = update.kept
            took_part.append(update.client)
        return FedSAState(mean.result(), state.begin, kept, min(took_part, default=state.newest))

    def network(self, spec: NetworkSpec) -> nn.Module:
        return self.base.network(self.config.rank, parts=(SHARED, OWN))

    def weights(self, state: FedSAState, tier: str) -> Tensors:
        return {**state.weights, **state.kept.get(state.newest, state.begin)}


ENTRY_POINT = FedSAConfig
