"""FFA-LoRA: A is drawn once and stays fixed, B is trained and averaged (Sun et al. 2024).

With one A for all clients, the mean of the products is the product of A with the mean of all B. Only B travels.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from torch import nn

from fedhm.config.method import Family, NamedEntry
from fedhm.methods.adapting import RankConfig, adapter_tensors, initial_adapters, smallest_rank_settings
from fedhm.methods.means import average
from fedhm.methods.method import Homogeneous, ModelState, Setup
from fedhm.networks.exchange import Tensors, load
from fedhm.work.messages import Update


class FFALoRAConfig(RankConfig):
    name: Literal["ffalora"] = "ffalora"

    def build(self, model: nn.Module, setup: Setup) -> "FFALoRA":
        return FFALoRA(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [NamedEntry("ffalora", lambda sizes: smallest_rank_settings("ffalora", sizes.adapters))]


class FFALoRA(Homogeneous):
    def __init__(self, model: nn.Module, config: FFALoRAConfig, setup: Setup = Setup()) -> None:
        super().__init__(config.tier)
        self.config, self._setup, self.base = config, setup, config.base(model, setup)
        self.base.check_rank(config.rank)
        begin = adapter_tensors(initial_adapters(self.base, config.rank, setup.seed), config.rank, self.base.shapes)
        self._a = {name: tensor for name, tensor in begin.items() if name.endswith(".u")}
        self._b = {name: tensor for name, tensor in begin.items() if name.endswith(".v")}

    def start(self, weights: Tensors) -> ModelState:
        return ModelState(self.base.head_of(weights) | self._b)

    def merge(self, state: ModelState, updates: Iterable[Update], round_number: int) -> ModelState:
        return ModelState(average(state.weights, updates, self.config.weighting, self._setup.output_layers))

    def build(self) -> nn.Module:
        return load(self.base.network(self.config.rank, fixed=("u",)), self._a)


ENTRY_POINT = FFALoRAConfig
