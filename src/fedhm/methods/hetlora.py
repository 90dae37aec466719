"""HetLoRA: smaller adapters are filled up with zeros, averaged factor by factor, and truncated (Cho et al. 2024).

    tasks    tier of rank r gets the first r rows of A and columns of B
    merge    A ← Σ wₚ (Aₚ; 0) / Σ wₚ, B likewise, with wₚ = ‖Bₚ Aₚ‖ over all layers: who learnt more counts more

Its self-pruning of ranks during training is not done here: tiers keep theirs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedhm.config.method_config import Family, NamedEntry
from fedhm.lowrank.change import inner
from fedhm.lowrank.unroll import join
from fedhm.methods.adapting import RanksConfig, as_sent, drawn
from fedhm.methods.mean import WeightedMean, influence, trained_rows
from fedhm.methods.method import Method, ModelState, Setup
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Participant, Task, Update


class HetLoRAConfig(RanksConfig):
    name: Literal["hetlora"] = "hetlora"
    sparsity_weights: bool = True  # without, each client counts by method.weighting

    def build(self, model: nn.Module, setup: Setup) -> "HetLoRA":
        return HetLoRA(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [NamedEntry("hetlora", lambda sizes: {"name": "hetlora", **sizes.adapters})]


class HetLoRA(Method[ModelState]):
    one_model = True

    def __init__(self, model: nn.Module, config: HetLoRAConfig, setup: Setup = Setup()) -> None:
        self.config, self._setup, self.base = config, setup, config.base(model, setup)
        self.levels, self.ranks = config.levels()
        self.tiers = tuple(self.ranks)
        self._largest = max(self.ranks.values())
        self.base.check_rank(self._largest)

    def start(self, weights: Tensors) -> ModelState:
        factors = drawn(self.base, self._largest, self._setup.seed)
        return ModelState(self.base.head_of(weights) | as_sent(factors, self._largest, self.base.shapes))

    def tasks(self, state: ModelState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for p in participants:
            yield Task("train", round_number, p.client, p.tier, p.tier, self.weights(state, p.tier))

    def merge(self, state: ModelState, updates: Iterable[Update], round_number: int) -> ModelState:
        mean = WeightedMean(state.weights)
        for update in updates:
            rows, weight = trained_rows(update, self._setup.classifier), influence(update, self.config.weighting)
            weight = weight * self.norm(update.tensors) if self.config.sparsity_weights else weight
            for name, tensor in update.tensors.items():
                classifier = name.rpartition(".")[0] == self._setup.classifier
                mean.add(name, self._padded(name, tensor), weight, rows if classifier else None)
        return ModelState(mean.result())

    def norm(self, tensors: Tensors) -> float:
        """Return the norm of what an adapter adds to the weights of all layers."""
        pairs = [join(tensors[f"{layer}.u"].double(), tensors[f"{layer}.v"].double()) for layer in self.base.shapes]
        return math.sqrt(sum(max(inner(pair, pair), 0.0) for pair in pairs))

    def _padded(self, name: str, tensor: Tensor) -> Tensor:
        axis = self._axis(name)
        if axis is None or tensor.shape[axis] == self._largest:
            return tensor
        shape = list(tensor.shape)
        shape[axis] = self._largest - shape[axis]
        return torch.cat([tensor, tensor.new_zeros(shape)], axis)

    def _axis(self, name: str) -> int | None:
        """Return which axis of a factor has the length of its rank; None of the head's tensors."""
        layer, _, part = name.rpartition(".")
        return {"u": 0, "v": 1}.get(part) if layer in self.base.shapes else None

    def network(self, name: str) -> nn.Module:
        return self.base.network(self.ranks[name])

    def weights(self, state: ModelState, tier: str) -> Tensors:
        cut: Tensors = {}
        for name, tensor in state.weights.items():
            axis = self._axis(name)
            cut[name] = tensor if axis is None else tensor.narrow(axis, 0, self.ranks[tier]).contiguous()
        return cut


ENTRY_POINT = HetLoRAConfig
