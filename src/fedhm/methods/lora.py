"""LoRA adapters of every rank, fine-tuned together: recovered, averaged, and factorized again for each rank.

The base is frozen, and all clients have it. The server keeps the sum that was added to each adapted weight, as factors
of the largest rank, and the head, which is trained whole.

    tasks    a tier of rank r gets the first r directions, as A and B, and the head
    merge    by models, by updates, or by bands, as FedHM, or by partitions (`lowrank/average.py`); "models" is the
             rule of FlexLoRA, "partitions" that of raFLoRA

With `fold`, nothing is truncated. A client folds everything that was learnt, at rank `fold_rank`, into its base. Its
adapter starts at zero on top of that. This costs bytes to download, and no tier is worse than another.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from fedhm.adapters.packing import FOLDED
from fedhm.config.method import Family, NamedEntry
from fedhm.config.section import Positive
from fedhm.lowrank.average import AdapterAggregate, AdapterSum, merge_adapters
from fedhm.lowrank.svd import Factors, to_matrix_factors
from fedhm.machine.device import parallel_map
from fedhm.methods.adapting import RanksConfig, adapter_tensors, initial_adapters
from fedhm.methods.means import WeightedMean, client_weight, trained_rows
from fedhm.methods.method import Method, Setup, State
from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Participant, Task, Update


class LoRAConfig(RanksConfig):
    name: Literal["lora"] = "lora"
    aggregate: AdapterAggregate = "bands"
    band_speed: Annotated[float, Field(ge=0, le=1)] = 1.0  # by bands: the speed of directions beyond the smallest rank
    fold: bool = False  # directions beyond a client's rank are folded into its base
    fold_rank: Positive = 64  # the rank that is folded

    def build(self, model: nn.Module, setup: Setup) -> "LoRA":
        return LoRA(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [
            NamedEntry("lora", lambda sizes: {"name": "lora", **sizes.adapters}),
            NamedEntry("flexlora", lambda sizes: {"name": "lora", **sizes.adapters, "aggregate": "models"}),
            NamedEntry("raflora", lambda sizes: {"name": "lora", **sizes.adapters, "aggregate": "partitions"}),
            NamedEntry("lora-updates", lambda sizes: {"name": "lora", **sizes.adapters, "aggregate": "updates"}),
            NamedEntry("lora-fold", lambda sizes: {"name": "lora", **sizes.adapters, "fold": True}),
        ]

    @property
    def remark(self) -> str:
        return "folds into the base" if self.fold else f"averages {self.aggregate}"


@dataclass(frozen=True)
class LoRAState(State):
    weights: Tensors  # of the head
    factors: dict[str, Factors]  # by layer, the sum that is added to its weight; smaller ranks are prefixes
    round: int = 0
    averaged: ClassVar[tuple[str, ...]] = ()  # factors are no weights that an optimizer could step on


class LoRA(Method[LoRAState]):
    state_type = LoRAState
    recovers = one_model = True

    def __init__(self, model: nn.Module, config: LoRAConfig, setup: Setup = Setup()) -> None:
        self.config, self._setup = config, setup
        self.base = config.base(model, setup)
        self.levels, self.ranks = config.levels()
        self.tiers = tuple(self.ranks)
        for rank in self.ranks.values():
            self.base.check_rank(rank)
        kept = min(config.fold_rank, *(min(shape) for shape in self.base.shapes.values()))
        self._kept = max(kept, *self.ranks.values()) if config.fold else max(self.ranks.values())

    def start(self, weights: Tensors) -> LoRAState:
        return LoRAState(self.base.head_of(weights), initial_adapters(self.base, self._kept, self._setup.seed))

    def tasks(self, state: LoRAState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        sent = {tier: self._task_of_tier(state, tier, round_number) for tier in {p.tier for p in participants}}
        for p in participants:
            yield replace(sent[p.tier], client=p.client)

    def _task_of_tier(self, state: LoRAState, tier: str, round_number: int) -> Task:
        """Return the task of a tier's clients; the caller fills in the client."""
        if not self.config.fold:
            return Task("train", round_number, -1, tier, self.spec(tier), self.weights(state, tier))
        rank = self.ranks[tier]
        begin = adapter_tensors(
            initial_adapters(self.base, rank, self._setup.seed, round_number), rank, self.base.shapes
        )
        learnt = adapter_tensors(state.factors, self._kept, self.base.shapes) if state.round else {}
        folded = {f"{FOLDED}{name}": tensor for name, tensor in learnt.items()}
        network = NetworkSpec(tier, f"folded {tier}", "folded")
        return Task("adapt", round_number, -1, tier, network, {**state.weights, **begin, **folded})

    def merge(self, state: LoRAState, updates: Iterable[Update], round_number: int) -> LoRAState:
        head = WeightedMean(state.weights)
        added: dict[str, dict[int, AdapterSum]] = {layer: {} for layer in self.base.shapes}
        for update in updates:
            weight, rows = client_weight(update, self.config.weighting), trained_rows(update, self._setup.output_layers)
            for layer, (n, m) in self.base.shapes.items():
                left, right = to_matrix_factors(update.tensors[f"{layer}.u"], update.tensors[f"{layer}.v"])
                for first, rank in self._parts(self.ranks[update.tier]):
                    level = added[layer].setdefault(rank, AdapterSum(rank, (m, n), 0 if self.config.fold else rank))
                    level.add(left[:, first:rank], right[first:rank], weight)
            for name in state.weights:
                classifier = name.rpartition(".")[0] in self._setup.output_layers
                head.add(name, update.tensors[name], weight, rows if classifier else None)
        how: AdapterAggregate = "updates" if self.config.fold else self.config.aggregate

        def factors_of(layer: str) -> Factors:
            found = merge_adapters(list(added[layer].values()), state.factors[layer], how, self.config.band_speed)
            return Factors(*(tensor.contiguous() for tensor in found))

        layers = list(self.base.shapes)
        factors = dict(zip(layers, parallel_map(factors_of, layers), strict=True))
        return LoRAState(head.result(), factors, round_number, diagnostics=self._diagnostics(factors))

    def _parts(self, rank: int) -> list[tuple[int, int]]:
        """Return first and last direction of each level to which a client of a rank adds its directions."""
        if self.config.fold or self.config.aggregate != "partitions":
            return [(0, rank)]
        ends = sorted(each for each in self.ranks.values() if each <= rank)
        return list(zip([0, *ends], ends, strict=False))

    def _diagnostics(self, factors: dict[str, Factors]) -> dict[str, float]:
        """Return the share of the squared norm that is beyond each tier's rank."""
        energies = [each.spectrum.double().square() for each in factors.values()]
        whole = sum(each.sum().item() for each in energies) or 1.0
        beyond = {tier: sum(each[rank:].sum().item() for each in energies) for tier, rank in self.ranks.items()}
        return {f"energy_beyond/{tier}": value / whole for tier, value in beyond.items() if tier != self.tiers[0]}

    def network(self, spec: NetworkSpec) -> nn.Module:
        if spec.variant == "folded":
            return self.base.network(self.ranks[spec.tier], folded=True)
        return self.base.network(self._kept if self.config.fold else self.ranks[spec.tier])

    def weights(self, state: LoRAState, tier: str) -> Tensors:
        rank = self._kept if self.config.fold else self.ranks[tier]
        return {**state.weights, **adapter_tensors(state.factors, rank, self.base.shapes)}


ENTRY_POINT = LoRAConfig
