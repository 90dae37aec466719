"""FedDLR: factors travel in both directions, and all clients train the full model.

    task    u, v with U Vᵀ the truncated SVD of the global model; the client recovers W = U Vᵀ and trains W
    update  u, v with U Vᵀ the truncated SVD of the W that it trained
    merge   W ← Σ αₚ Uₚ Vₚᵀ / Σ αₚ, and its truncated SVD again

It saves bytes, but neither MACs nor memory. The server keeps, sends and evaluates the truncated model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedhm.config.method import Family, MethodConfig, NamedEntry
from fedhm.config.section import Ratio, tier_name
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.layers import dense_weight_name
from fedhm.lowrank.svd import factorize, roll, to_layer_factors, to_matrix_factors, unroll
from fedhm.methods.means import average
from fedhm.methods.method import Method, Setup, State
from fedhm.methods.plans import ratio_plan
from fedhm.networks.exchange import Tensors, set_packing
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Participant, Task, Update


@dataclass(frozen=True)
class Factored:
    """The form that travels: for every layer in the plan, its factors `u` and `v` in place of its weight."""

    plan: Mapping[str, int]

    def pack(self, tensors: Tensors) -> Tensors:
        packed = dict(tensors)
        for layer, rank in self.plan.items():
            weight = packed.pop(dense_weight_name(layer))
            packed[f"{layer}.u"], packed[f"{layer}.v"] = _factors(weight, rank)
        return packed

    def unpack(self, tensors: Tensors) -> Tensors:
        unpacked = dict(tensors)
        for layer in self.plan:
            if f"{layer}.u" in tensors:
                u, v = unpacked.pop(f"{layer}.u"), unpacked.pop(f"{layer}.v")
                left, right = to_matrix_factors(u, v)
                # (n, m, k₁, k₂) of u (r, m, k₁, 1) and v (n, r, 1, k₂), or (n, m) of u (r, m) and v (n, r)
                shape = torch.Size((v.shape[0], *u.shape[1:3], *v.shape[3:]))
                unpacked[dense_weight_name(layer)] = roll(left @ right, shape)
        return unpacked


class FedDLRConfig(MethodConfig):
    name: Literal["feddlr"] = "feddlr"
    by_coordinate: ClassVar[bool] = True
    weighting: Literal["uniform", "samples"] = "uniform"
    tier: Ratio = 1 / 4  # the rank ratio of what travels
    keep: Annotated[int, Field(ge=0)] = 1

    def build(self, model: nn.Module, setup: Setup) -> "FedDLR":
        return FedDLR(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [NamedEntry("feddlr", lambda sizes: {"name": "feddlr", "tier": min(sizes.ratios), "keep": sizes.keep})]


@dataclass(frozen=True)
class FedDLRState(State):
    weights: Tensors  # of the full model, which is what `packed` recovers
    packed: Tensors  # as they travel


class FedDLR(Method[FedDLRState]):
    state_type = FedDLRState

    def __init__(self, model: nn.Module, config: FedDLRConfig, setup: Setup = Setup()) -> None:
        self.config, self._setup = config, setup
        self.tiers = self.levels = (tier_name(config.tier),)
        self.form = Factored(ratio_plan(model, config.tier, config.keep, setup.output_layers))
        self._model = model

    def start(self, weights: Tensors) -> FedDLRState:
        return self._truncated(weights)

    def tasks(self, state: FedDLRState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for p in participants:
            yield Task("train", round_number, p.client, p.tier, self.spec(self.tiers[0]), state.packed)

    def merge(self, state: FedDLRState, updates: Iterable[Update], round_number: int) -> FedDLRState:
        recovered = (replace(update, tensors=self.form.unpack(update.tensors)) for update in updates)
        mean = average(
            state.weights, recovered, self.config.weighting, self._setup.output_layers, self._setup.make_mean
        )
        return FedDLRState(mean, state.packed) if self._setup.optimizer_follows else self._truncated(mean)

    def refresh_derived(self, state: FedDLRState, before: FedDLRState) -> FedDLRState:
        return self._truncated(state.weights)

    def network(self, spec: NetworkSpec) -> nn.Module:
        if spec.tier not in self.tiers:
            raise FedhmError(f"FedDLR has one network, '{self.tiers[0]}', not '{spec}'")
        return set_packing(to_hybrid(self._model, {}), self.form)

    def weights(self, state: FedDLRState, tier: str) -> Tensors:
        return state.packed

    def _truncated(self, weights: Tensors) -> FedDLRState:
        packed = self.form.pack(weights)
        return FedDLRState(self.form.unpack(packed), packed)


def _factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    matrix = unroll(weight)
    if matrix.isfinite().all():
        left, right = factorize(matrix, rank).prefix(rank)
    else:  # a client that diverged has no decomposition; admission refuses its NaN with a reason
        left, right = (matrix.new_full(shape, torch.nan) for shape in ((len(matrix), rank), (rank, matrix.shape[1])))
    return to_layer_factors(left, right, weight.shape)


ENTRY_POINT = FedDLRConfig
