"""LoRA at one rank for all clients (FedIT): A and B are averaged separately.

A ← Σ αₚ Aₚ / Σ αₚ,   B ← Σ αₚ Bₚ / Σ αₚ          their product is not the mean of the products
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from torch import nn

from fedhm.config.method import Family, NamedEntry
from fedhm.methods.adapting import RankConfig, adapter_tensors, initial_adapters, rank_settings, smallest_rank_settings
from fedhm.methods.means import average
from fedhm.methods.method import Homogeneous, ModelState, Setup
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Update


class HomoLoRAConfig(RankConfig):
    name: Literal["homolora"] = "homolora"

    def build(self, model: nn.Module, setup: Setup) -> "HomoLoRA":
        return HomoLoRA(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [
            NamedEntry("homolora", lambda sizes: smallest_rank_settings("homolora", sizes.adapters)),
            NamedEntry(
                "homolora-largest",
                lambda sizes: rank_settings("homolora", sizes.adapters, max(sizes.adapters.get("ranks", [16]))),
            ),
        ]


class HomoLoRA(Homogeneous):
    def __init__(self, model: nn.Module, config: HomoLoRAConfig, setup: Setup = Setup()) -> None:
        super().__init__(config.tier)
        self.config, self._setup, self.base = config, setup, config.base(model, setup)
        self.base.check_rank(config.rank)

    def start(self, weights: Tensors) -> ModelState:
        factors = initial_adapters(self.base, self.config.rank, self._setup.seed)
        return ModelState(self.base.head_of(weights) | adapter_tensors(factors, self.config.rank, self.base.shapes))

    def merge(self, state: ModelState, updates: Iterable[Update], round_number: int) -> ModelState:
        return ModelState(average(state.weights, updates, self.config.weighting, self._setup.output_layers))

    def build(self) -> nn.Module:
        return self.base.network(self.config.rank)


ENTRY_POINT = HomoLoRAConfig
