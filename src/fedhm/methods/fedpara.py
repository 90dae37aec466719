"""FedPara: one network for all clients, its weights composed as (X₁ Y₁ᵀ) ⊙ (X₂ Y₂ᵀ); the factors are averaged.

The factors start at random, at the scale of the weights that they replace. So in a pretrained model, only the dense
layers keep their weights. MACs per sample are those of the full model; the weights are composed once for each batch.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field
from torch import nn

from fedhm.config.method import Family, MethodConfig, NamedEntry, only_uniform
from fedhm.config.section import as_ratio
from fedhm.errors import FedhmError
from fedhm.lowrank.hadamard import plan_hadamard
from fedhm.lowrank.hybrid import to_hadamard, to_hybrid
from fedhm.methods.means import average
from fedhm.methods.method import Homogeneous, ModelState, Setup
from fedhm.networks.exchange import Tensors, exchanged_tensors, load
from fedhm.seeds import torch_generator
from fedhm.work.messages import Update


class FedParaConfig(MethodConfig):
    name: Literal["fedpara"] = "fedpara"
    by_coordinate: ClassVar[bool] = True
    weighting: Literal["uniform", "samples"] = "uniform"
    # γ: from the smallest useful rank to the one that saves nothing
    ratio: Annotated[float, BeforeValidator(as_ratio), Field(ge=0, le=1)] = 0.1
    keep: Annotated[int, Field(ge=0)] = 1

    def build(self, model: nn.Module, setup: Setup) -> "FedPara":
        return FedPara(model, self, setup)

    @property
    def unbounded(self) -> str:
        return only_uniform(self.weighting)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [NamedEntry("fedpara", lambda sizes: {"name": "fedpara", "keep": sizes.keep})]


class FedPara(Homogeneous):
    def __init__(self, model: nn.Module, config: FedParaConfig, setup: Setup = Setup()) -> None:
        super().__init__(f"fedpara-{config.ratio:g}")
        self.config = config
        self.plan = plan_hadamard(model, config.ratio, config.keep, classifier=setup.output_layers or "auto")
        if not self.plan:
            raise FedhmError(
                f"there is nothing to compose for FedPara: every layer stays dense; "
                f"choose a smaller method.ratio or a smaller method.keep\n{self.plan}"
            )
        self._model = model
        self._setup = setup

    def start(self, weights: Tensors) -> ModelState:
        model = load(to_hybrid(self._model, {}), weights)
        generator = torch_generator(self._setup.seed, "fedpara")
        return ModelState(exchanged_tensors(to_hadamard(model, self.plan, generator)))

    def merge(self, state: ModelState, updates: Iterable[Update], round_number: int) -> ModelState:
        return ModelState(
            average(state.weights, updates, self.config.weighting, self._setup.output_layers, self._setup.make_mean)
        )

    def build(self) -> nn.Module:
        return to_hadamard(self._model, self.plan)


ENTRY_POINT = FedParaConfig
