"""What FedHM's server carries from round to round, and how much each update counts."""

import math
from dataclasses import dataclass
from typing import Protocol

from fedhm.errors import FedhmError
from fedhm.lowrank.decompositions.svd import Factors
from fedhm.lowrank.decompositions.unroll import split
from fedhm.lowrank.plan import RankPlan
from fedhm.methods.method import State
from fedhm.methods.tier_budgets import Planned
from fedhm.networks.exchange import Tensors


@dataclass(frozen=True)
class FedHMState(State):
    weights: Tensors  # the full model
    factors: dict[str, Factors]  # by layer, its decomposition at the largest rank that any tier asks for


@dataclass(frozen=True)
class PlannedState(FedHMState):
    """The state of a run with tiers that are budgets."""

    planned: dict[str, Planned]  # by tier
    round: int = 0


def tensors_at(state: FedHMState, plan: RankPlan) -> Tensors:
    """Return the tensors of a hybrid network: the leading directions of a plan's layers, all else as it is.

    A state from before such layers were factorized is refused.
    """
    tensors = {name: t for name, t in state.weights.items() if name.removesuffix(".weight") not in plan}
    for layer, rank in plan.items():
        if layer not in state.factors:
            raise FedhmError(
                f"layer '{layer}' was not factorized by the version of fedhm that began this run, and is by this one: "
                "resume it with that version, or start it again in another folder"
            )
        shape = state.weights[f"{layer}.weight"].shape
        tensors[f"{layer}.u"], tensors[f"{layer}.v"] = split(*state.factors[layer].prefix(rank), shape)
    return tensors


class Weighting(Protocol):
    """The settings that decide on weights."""

    @property
    def weighting(self) -> str: ...
    @property
    def temperature(self) -> float: ...


def weight_of(config: Weighting, ratio: float, samples: int) -> float:
    """Return αₚ up to a factor, which the mean divides out; the exponents are at most 0, so nothing overflows."""
    if config.weighting == "softmax":  # the paper: softmax(γ / τ)
        return math.exp((ratio - 1) / config.temperature)
    if config.weighting == "softmax-inverse":  # published code: softmax(−(1 / γ) / τ)
        return math.exp((1 - 1 / ratio) / config.temperature)
    return float(samples) if config.weighting == "samples" else 1.0
