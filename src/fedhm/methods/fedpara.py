"""FedPara: one network for everybody, its weights composed as (X₁ Y₁ᵀ) ⊙ (X₂ Y₂ᵀ); the factors are averaged.

The factors start at random, at the scale of the weights whose place they take: of a model that was trained before,
only the dense layers go on from there. MACs per sample are those of the full model; the weights are composed once for
each batch.
"""

from collections.abc import Iterable

from torch import nn

from fedhm.config.method import FedParaConfig
from fedhm.errors import FedhmError
from fedhm.lowrank.hadamard import plan_hadamard
from fedhm.lowrank.hybrid import to_hadamard, to_hybrid
from fedhm.methods.homogeneous import Homogeneous
from fedhm.methods.mean import average
from fedhm.methods.method import Setup, State
from fedhm.networks.exchange import Tensors, exchanged, load
from fedhm.seeds import torch_generator
from fedhm.work.messages import Update


class FedPara(Homogeneous):
    def __init__(self, model: nn.Module, config: FedParaConfig, setup: Setup = Setup()) -> None:
        super().__init__(f"fedpara-{config.ratio:g}")
        self.config = config
        self.plan = plan_hadamard(model, config.ratio, config.keep, classifier=setup.classifier or "auto")
        if not self.plan:
            raise FedhmError(
                f"there is nothing to compose for FedPara: every layer stays dense; "
                f"choose a smaller method.ratio or a smaller method.keep\n{self.plan}"
            )
        self._model = model
        self._setup = setup

    def start(self, weights: Tensors) -> State:
        model = load(to_hybrid(self._model, {}), weights)
        generator = torch_generator(self._setup.seed, "fedpara")
        return State(exchanged(to_hadamard(model, self.plan, generator)))

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        return State(average(state.weights, updates, self.config.weighting, self._setup.classifier))

    def build(self) -> nn.Module:
        return to_hadamard(self._model, self.plan)
