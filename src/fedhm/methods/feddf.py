"""FedDF: every tier has its own model; the server distils the mean logits of all clients' models into each of them.

merge    W_γ ← Σ αₚ Wₚ / Σ αₚ                      over the round's clients p of tier γ
         t ← mean over all p of f_p(x)             on the public inputs x
         W_γ ← Adam on KL(softmax(t) ‖ softmax(f_γ(x)))   over batches of x, for every tier γ

The published server stops early on a validation set and lowers its learning rate meanwhile. Here it takes a fixed
number of steps at one rate. Both passes over the public inputs run on the clients' device.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedhm.config.method import PAPER_WIDTHS, Family, MethodConfig, NamedEntry, matched_widths
from fedhm.config.section import Positive, Ratios
from fedhm.machine.device import CPU, move_tensors, seeded
from fedhm.machine.memory import DISTILLATION_ADVICE, memory_errors
from fedhm.methods.means import WeightedMean, client_weight
from fedhm.methods.method import Method, Setup, State
from fedhm.methods.sliced import WidthSlices
from fedhm.networks.exchange import Tensors, exchanged_tensors, load
from fedhm.networks.reuse import on_device
from fedhm.networks.spec import NetworkSpec
from fedhm.networks.structure import channels_last
from fedhm.seeds import derive, torch_generator
from fedhm.work.distil import distil_towards, logits
from fedhm.work.messages import Participant, Task, Update


class FedDFConfig(MethodConfig):
    name: Literal["feddf"] = "feddf"
    needs_public: ClassVar[bool] = True
    server_trains: ClassVar[bool] = True
    weighting: Literal["uniform", "samples"] = "uniform"
    tiers: Ratios = PAPER_WIDTHS  # widths; every tier has its own model
    steps: Positive = 50  # of distillation after each round
    lr: Annotated[float, Field(gt=0)] = 1e-3
    batch: Annotated[int, Field(ge=2)] = 64  # batch normalisation has no variance of a single value

    def build(self, model: nn.Module, setup: Setup) -> "FedDF":
        return FedDF(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return matched_widths("feddf")

    @property
    def shares(self) -> Sequence[float]:
        return self.tiers


@dataclass(frozen=True)
class FedDFState(State):
    models: dict[str, Tensors]  # by tier
    averaged: ClassVar[tuple[str, ...]] = ("models",)


class FedDF(Method[FedDFState]):
    state_type = FedDFState

    def __init__(self, model: nn.Module, config: FedDFConfig, setup: Setup) -> None:
        self.config, self._public, self._objective = config, setup.public, setup.objective
        self.slices = WidthSlices(model, config.tiers, setup)
        self.tiers, self.levels = self.slices.tiers, self.slices.levels
        self._classifiers, self._seed = setup.output_layers, setup.seed

    def start(self, weights: Tensors) -> FedDFState:
        return FedDFState({t: self.slices.rescale_init(self.slices.slice_weights(weights, t), t) for t in self.tiers})

    def tasks(self, state: FedDFState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for p in participants:
            yield Task("train", round_number, p.client, p.tier, self.spec(p.tier), state.models[p.tier])

    @memory_errors("to distil the clients' models", DISTILLATION_ADVICE)
    def merge(self, state: FedDFState, updates: Iterable[Update], round_number: int) -> FedDFState:
        assert self._public is not None
        means = {tier: WeightedMean(model) for tier, model in state.models.items()}
        teacher = torch.zeros((), device=self._public.device)  # the clients' logits on the public inputs, summed
        teachers = 0
        for update in updates:
            means[update.tier].add_all(update, client_weight(update, self.config.weighting), self._classifiers)
            client = on_device(load(self.network(update.network), update.tensors), self._public.device)
            found = logits(client, self._public, self.config.batch)
            if bool(found.isfinite().all()):  # weights within their bounds may still overflow
                teacher, teachers = teacher + found, teachers + 1
        models = {tier: mean.result() for tier, mean in means.items()}
        if teachers:
            for tier, model in models.items():
                models[tier] = model | self._distilled(model, teacher / teachers, tier, round_number)
        return FedDFState(models)

    def network(self, spec: NetworkSpec) -> nn.Module:
        return self.slices.network(spec)

    def weights(self, state: FedDFState, tier: str) -> Tensors:
        return state.models[tier]

    def _distilled(self, weights: Tensors, teacher: Tensor, tier: str, round_number: int) -> Tensors:
        assert self._public is not None
        device = self._public.device
        student = channels_last(on_device(load(self.network(self.spec(tier)), weights), device))
        batches = self._public.shuffled(
            self.config.batch, torch_generator(self._seed, "distil", round_number, tier), self.config.steps
        )
        optimizer = torch.optim.Adam(student.parameters(), lr=self.config.lr)
        with seeded(derive(self._seed, "dropout", round_number, tier), device):
            distil_towards(student, teacher, self._objective.divergence, optimizer, batches)
        found = exchanged_tensors(student)
        return found if device == CPU else move_tensors(found, CPU)


ENTRY_POINT = FedDFConfig
