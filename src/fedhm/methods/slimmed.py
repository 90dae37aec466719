"""Width-slimmed FedAvg: one narrower network for all clients. The paper's FedAvg has the smallest width."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from torch import nn

from fedhm.config.method import Family, MethodConfig, NamedEntry, only_uniform
from fedhm.config.section import Ratio, width_name
from fedhm.methods.means import average
from fedhm.methods.method import Homogeneous, ModelState, Setup
from fedhm.methods.sliced import WidthSlices
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Update


class SlimmedConfig(MethodConfig):
    name: Literal["slimmed"] = "slimmed"
    by_coordinate: ClassVar[bool] = True
    weighting: Literal["uniform", "samples"] = "uniform"
    width: Ratio = 0.35  # one width for all clients

    def build(self, model: nn.Module, setup: Setup) -> "Slimmed":
        return Slimmed(model, self, setup)

    @property
    def unbounded(self) -> str:
        return only_uniform(self.weighting)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [
            Family(
                "slimmed",
                lambda sizes: sorted(set(sizes.widths), reverse=True),
                lambda _, width: {"name": "slimmed", "width": width},
                "{:g}".format,
            )
        ]

    @property
    def column(self) -> str:
        return "slimmed"


class Slimmed(Homogeneous):
    def __init__(self, model: nn.Module, config: SlimmedConfig, setup: Setup) -> None:
        super().__init__(width_name(config.width))
        self.config = config
        self.slices = WidthSlices(model, (config.width,), setup)
        self._classifiers, self._make_mean = setup.output_layers, setup.make_mean

    def start(self, weights: Tensors) -> ModelState:
        return ModelState(self.slices.rescale_init(self.slices.slice_weights(weights, self.tier), self.tier))

    def merge(self, state: ModelState, updates: Iterable[Update], round_number: int) -> ModelState:
        return ModelState(average(state.weights, updates, self.config.weighting, self._classifiers, self._make_mean))

    def build(self) -> nn.Module:
        return self.slices.network(self.spec(self.tier))


ENTRY_POINT = SlimmedConfig
