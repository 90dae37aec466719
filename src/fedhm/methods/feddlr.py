"""FedDLR: factors travel in both directions, everybody trains the full model.

    task    u, v with U Vᵀ the truncated SVD of the global model; the client recovers W = U Vᵀ and trains W
    update  u, v with U Vᵀ the truncated SVD of what it trained
    merge   W ← Σ αₚ Uₚ Vₚᵀ / Σ αₚ, and its truncated SVD again

It saves bytes, but neither MACs nor memory. What the server keeps, sends and evaluates is the truncated model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedhm.config.method import FedDLRConfig, tier_name
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.svd import factorize
from fedhm.lowrank.unroll import join, roll, split, unroll
from fedhm.methods.homogeneous import Homogeneous
from fedhm.methods.mean import average
from fedhm.methods.method import Setup, State
from fedhm.methods.tier_plan import tier_plan
from fedhm.networks.exchange import Tensors, travels_as
from fedhm.work.messages import Update


@dataclass(frozen=True)
class Factored:
    """The wire form: of every layer in the plan its factors `u` and `v` at that rank, in place of its weight."""

    plan: Mapping[str, int]

    def pack(self, tensors: Tensors) -> Tensors:
        packed = dict(tensors)
        for layer, rank in self.plan.items():
            weight = packed.pop(f"{layer}.weight")
            packed[f"{layer}.u"], packed[f"{layer}.v"] = _factors(weight, rank)
        return packed

    def unpack(self, tensors: Tensors) -> Tensors:
        unpacked = dict(tensors)
        for layer in self.plan:
            if f"{layer}.u" in tensors:
                u, v = unpacked.pop(f"{layer}.u"), unpacked.pop(f"{layer}.v")
                left, right = join(u, v)
                # (n, m, k₁, k₂) of u (r, m, k₁, 1) and v (n, r, 1, k₂), or (n, m) of u (r, m) and v (n, r)
                shape = torch.Size((v.shape[0], *u.shape[1:3], *v.shape[3:]))
                unpacked[f"{layer}.weight"] = roll(left @ right, shape)
        return unpacked


class FedDLR(Homogeneous):
    def __init__(self, model: nn.Module, config: FedDLRConfig, setup: Setup = Setup()) -> None:
        super().__init__(tier_name(config.tier))
        self.config = config
        self.form = Factored(tier_plan(model, config.tier, config.keep, setup.classifier))
        self._model = model
        self._classifier = setup.classifier

    def start(self, weights: Tensors) -> State:
        return State(self.form.pack(weights))

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        recovered = (replace(update, tensors=self.form.unpack(update.tensors)) for update in updates)
        old = self.form.unpack(state.weights)
        return State(self.form.pack(average(old, recovered, self.config.weighting, self._classifier)))

    def build(self) -> nn.Module:
        return travels_as(to_hybrid(self._model, {}), self.form)


def _factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    matrix = unroll(weight)
    if matrix.isfinite().all():
        left, right = factorize(matrix, rank).prefix(rank)
    else:  # a client that diverged has no decomposition to send; admission says why it is refused
        left, right = (matrix.new_full(shape, torch.nan) for shape in ((len(matrix), rank), (rank, matrix.shape[1])))
    return split(left, right, weight.shape)
