"""HetLoRA: smaller adapters are padded with zeros, averaged factor by factor, and truncated (Cho et al. 2024).

    tasks    a tier of rank r gets the first r rows of A and columns of B
    merge    A ← Σ wₚ (Aₚ; 0) / Σ wₚ, B likewise, with wₚ = ‖Bₚ Aₚ‖ of the layer: clients that learnt more count more

With `prune` = γ below 1, clients prune their own ranks (`work/prune.py`). If a client's last directions, from γ r on,
are smaller after training than those it was sent, the client gives them up for good and is sent fewer from then on.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedhm.config.method import Family, NamedEntry
from fedhm.lowrank.delta import inner_product
from fedhm.lowrank.svd import to_matrix_factors
from fedhm.methods.adapting import RanksConfig, adapter_tensors, initial_adapters
from fedhm.methods.means import WeightedMean, client_weight, trained_rows
from fedhm.methods.method import Method, ModelState, Setup
from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Participant, Task, TaskOptions, Update


class HetLoRAConfig(RanksConfig):
    name: Literal["hetlora"] = "hetlora"
    sparsity_weights: bool = True  # False: each client counts by method.weighting
    prune: Annotated[float, Field(gt=0, le=1)] = 1.0  # γ: the share of a rank that is left after pruning; 1: no pruning
    penalty: Annotated[float, Field(ge=0)] = 1e-3  # λ, on the norms of the directions that may be pruned

    def build(self, model: nn.Module, setup: Setup) -> "HetLoRA":
        return HetLoRA(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [
            NamedEntry("hetlora", lambda sizes: {"name": "hetlora", **sizes.adapters}),
            NamedEntry("hetlora-prune", lambda sizes: {"name": "hetlora", **sizes.adapters, "prune": 0.99}),
        ]

    @property
    def remark(self) -> str:
        return f"prunes ranks by {self.prune:g}" if self.prune < 1 else ""


@dataclass(frozen=True)
class HetLoRAState(ModelState):
    ranks: dict[int, int] = field(default_factory=dict)  # by client, if it has pruned its rank


class HetLoRA(Method[HetLoRAState]):
    state_type = HetLoRAState
    one_model = True

    def __init__(self, model: nn.Module, config: HetLoRAConfig, setup: Setup = Setup()) -> None:
        self.config, self._setup, self.base = config, setup, config.base(model, setup)
        self.levels, self.ranks = config.levels()
        self.tiers = tuple(self.ranks)
        self._largest = max(self.ranks.values())
        self.base.check_rank(self._largest)

    def start(self, weights: Tensors) -> HetLoRAState:
        factors = initial_adapters(self.base, self._largest, self._setup.seed)
        return HetLoRAState(self.base.head_of(weights) | adapter_tensors(factors, self._largest, self.base.shapes))

    def tasks(self, state: HetLoRAState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for p in participants:
            rank = self.ranks[p.tier]
            if self.config.prune == 1:
                yield Task("train", round_number, p.client, p.tier, self.spec(p.tier), self._cut(state, rank))
                continue
            rank = min(rank, state.ranks.get(p.client, rank))
            options = TaskOptions(kept_rank=self._rank_left(rank), penalty=self.config.penalty)
            network = NetworkSpec(p.tier, f"rank {rank}", "pruned", number=rank)
            yield Task("prune", round_number, p.client, p.tier, network, self._cut(state, rank), options=options)

    def _rank_left(self, rank: int) -> int:
        return max(1, int(self.config.prune * rank))

    def merge(self, state: HetLoRAState, updates: Iterable[Update], round_number: int) -> HetLoRAState:
        mean, ranks = WeightedMean(state.weights), dict(state.ranks)
        for update in updates:
            rows, weight = trained_rows(update, self._setup.output_layers), client_weight(update, self.config.weighting)
            norms = self.norms(update.tensors) if self.config.sparsity_weights else {}
            for name, tensor in update.tensors.items():
                layer = name.rpartition(".")[0]
                classifier = layer in self._setup.output_layers
                mean.add(name, self._padded(name, tensor), norms.get(layer, weight), rows if classifier else None)
            if self.config.prune < 1:
                ranks[update.client] = self._rank_kept(update.tensors)
        return HetLoRAState(mean.result(), ranks)

    def norms(self, tensors: Tensors) -> dict[str, float]:
        """Return by layer the norm of the adapter's product, which is added to the weight."""
        found = {}
        for layer in self.base.shapes:
            pair = to_matrix_factors(tensors[f"{layer}.u"].double(), tensors[f"{layer}.v"].double())
            found[layer] = math.sqrt(max(inner_product(pair, pair), 0.0))
        return found

    def _rank_kept(self, tensors: Tensors) -> int:
        """Return the rank that a client has kept: it sends pruned directions as zeros."""
        factors = [tensors[f"{layer}.u"] for layer in self.base.shapes]
        rank = len(factors[0])
        left = self._rank_left(rank)
        return rank if any(bool(factor[left:].any()) for factor in factors) else left

    def _padded(self, name: str, tensor: Tensor) -> Tensor:
        axis = self._axis(name)
        if axis is None or tensor.shape[axis] == self._largest:
            return tensor
        shape = list(tensor.shape)
        shape[axis] = self._largest - shape[axis]
        return torch.cat([tensor, tensor.new_zeros(shape)], axis)

    def _axis(self, name: str) -> int | None:
        """Return which axis of a factor has the length of its rank; None for tensors of the head."""
        layer, _, part = name.rpartition(".")
        return {"u": 0, "v": 1}.get(part) if layer in self.base.shapes else None

    def network(self, spec: NetworkSpec) -> nn.Module:
        return self.base.network(spec.number if spec.variant == "pruned" else self.ranks[spec.tier])

    def weights(self, state: HetLoRAState, tier: str) -> Tensors:
        return self._cut(state, self.ranks[tier])

    def _cut(self, state: HetLoRAState, rank: int) -> Tensors:
        cut: Tensors = {}
        for name, tensor in state.weights.items():
            axis = self._axis(name)
            cut[name] = tensor if axis is None else tensor.narrow(axis, 0, rank).contiguous()
        return cut


ENTRY_POINT = HetLoRAConfig
