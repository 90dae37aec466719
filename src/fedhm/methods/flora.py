"""FLoRA: the clients' adapters are stacked, and merged into the base of all clients (Wang et al. 2024).

    merge    W ← W + (p₁ B₁, p₂ B₂, …)(A₁; A₂; …),   p = αₚ / Σ α, which is the mean of the products without noise
    tasks    every client gets everything that was added to W so far, folds it into its base, and starts a new adapter

The published protocol sends each round's stack to clients that have merged all earlier stacks. Clients here keep
nothing, so everything that was added so far is sent, and its bytes are counted. It is sent stacked, until the sum has
fewer numbers (`lowrank/average.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from fedhm.adapters.packing import FOLDED
from fedhm.config.method import Family, NamedEntry
from fedhm.lowrank.average import ProductSum, StackedProducts, add_stacked
from fedhm.methods.adapting import RanksConfig, adapter_tensors, initial_adapters
from fedhm.methods.means import WeightedMean, client_weight, trained_rows
from fedhm.methods.method import Method, Setup, State
from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Participant, Task, Update


class FLoRAConfig(RanksConfig):
    name: Literal["flora"] = "flora"

    def build(self, model: nn.Module, setup: Setup) -> "FLoRA":
        return FLoRA(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [NamedEntry("flora", lambda sizes: {"name": "flora", **sizes.adapters})]


@dataclass(frozen=True)
class FLoRAState(State):
    weights: Tensors  # of the head
    added: Tensors  # everything added to the weights so far: LAYER.u and LAYER.v, or their product as LAYER
    round: int = 0
    averaged: ClassVar[tuple[str, ...]] = ()


class FLoRA(Method[FLoRAState]):
    state_type = FLoRAState
    recovers = one_model = True

    def __init__(self, model: nn.Module, config: FLoRAConfig, setup: Setup = Setup()) -> None:
        self.config, self._setup, self.base = config, setup, config.base(model, setup)
        self.levels, self.ranks = config.levels()
        self.tiers = tuple(self.ranks)
        self.base.check_rank(max(self.ranks.values()))

    def start(self, weights: Tensors) -> FLoRAState:
        return FLoRAState(self.base.head_of(weights), {})

    def tasks(self, state: FLoRAState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for p in participants:
            # Each client draws its own A: with one A for all, the stack would hardly have more directions than one A.
            yield Task("adapt", round_number, p.client, p.tier, self.spec(p.tier), self._sent(state, p.tier, p.client))

    def merge(self, state: FLoRAState, updates: Iterable[Update], round_number: int) -> FLoRAState:
        head, total = WeightedMean(state.weights), 0.0
        stacks = {layer: ProductSum(shape) for layer, shape in self.base.shapes.items()}
        for update in updates:
            weight, rows = client_weight(update, self.config.weighting), trained_rows(update, self._setup.output_layers)
            total += weight
            for layer, stack in stacks.items():
                stack.add(update.tensors[f"{layer}.u"], update.tensors[f"{layer}.v"], weight)
            for name in state.weights:
                classifier = name.rpartition(".")[0] in self._setup.output_layers
                head.add(name, update.tensors[name], weight, rows if classifier else None)
        if not total:
            return state
        added: Tensors = {}
        for layer, stack in stacks.items():
            before, now = _of(state.added, layer), stack.over(total)
            now = add_stacked(before, now) if before else now
            added |= {layer: now[0]} if len(now) == 1 else {f"{layer}.u": now[0], f"{layer}.v": now[1]}
        return FLoRAState(head.result(), added, round_number)

    def network(self, spec: NetworkSpec) -> nn.Module:
        return self.base.network(self.ranks[spec.tier], folded=True)

    def weights(self, state: FLoRAState, tier: str) -> Tensors:
        return self._sent(state, tier)

    def _sent(self, state: FLoRAState, tier: str, *client: int) -> Tensors:
        begin = initial_adapters(self.base, self.ranks[tier], self._setup.seed, state.round, *client)
        folded = {
            f"{FOLDED}{f'{name}.weight' if name in self.base.shapes else name}": tensor
            for name, tensor in state.added.items()
        }
        return {**state.weights, **adapter_tensors(begin, self.ranks[tier], self.base.shapes), **folded}


def _of(added: Tensors, layer: str) -> StackedProducts | None:
    """Return everything that was added to a layer's weight; None before the first round."""
    if layer in added:
        return (added[layer],)
    return (added[f"{layer}.u"], added[f"{layer}.v"]) if added else None


ENTRY_POINT = FLoRAConfig
