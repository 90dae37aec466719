"""FedHM: every tier trains a hybrid network at its own rank; the server recovers, averages, factorizes again.

Round t, with the full model W and one decomposition L R of every factorized layer at the largest rank, found from the
one of the round before:

    tasks    tier γ gets the dense layers of W and the first r_γ directions of L R
    merge    W ← Σ αₚ recoveredₚ / Σ αₚ,  recoveredₚ = Uₚ Vₚᵀ or the dense weight of a full client     (models)
             W ← W + Σ αₚ (recoveredₚ − sentₚ) / Σ αₚ                                                (updates)
             the same, each band of a change averaged over those whose rank reaches it               (bands)

The paper averages models. Directions beyond a tier's rank then shrink every round by the share of the clients that
could not carry them. Averaging updates leaves them alone, but trains them at that share of the speed; by bands they
move as fast as if those who can carry them were alone. There, clients of larger tiers also train smaller ones inside
theirs (`train.nested`), so that a smaller tier's network is one that was trained, and not what truncation leaves.

In warm-up rounds every tier trains the full network, with the weight of γ = 1: the best directions are found before
anything is cut off.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from fedhm.config.method_config import Family, MethodConfig, NamedEntry, Settings, Sizes, replace_largest
from fedhm.config.section import Ratios, tier_name
from fedhm.errors import FedhmError
from fedhm.lowrank.bands import directions
from fedhm.lowrank.diagnostics import layer_constants, tier_energies
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.nested import Inside, contain
from fedhm.lowrank.plan import RankPlan
from fedhm.lowrank.svd import Factors
from fedhm.lowrank.unroll import roll, split, unroll
from fedhm.lowrank.warm import decompose
from fedhm.machine.side_by_side import side_by_side
from fedhm.methods.method import Method, Setup, State
from fedhm.methods.recovered import Aggregate, RecoveredMean, unbounded
from fedhm.methods.tier_plan import tier_plan
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Participant, Task, Update
from fedhm.work.nested import BASIS

FULL = tier_name(1)
PAPER: Settings = {"aggregate": "models", "start": "whole"}
NESTED = "nested "  # before a tier: its network with the smaller tiers inside


class FedHMConfig(MethodConfig):
    as_before: ClassVar = {"aggregate": "models", "start": "whole"}
    by_coordinate: ClassVar[bool] = True
    name: Literal["fedhm"] = "fedhm"
    tiers: Ratios = (1.0, 1 / 2, 1 / 4, 1 / 8)  # one listed twice has two shares of the clients
    keep: Annotated[int, Field(ge=0)] = 1  # the paper's ρ
    weighting: Literal["uniform", "samples", "softmax", "softmax-inverse"] = "uniform"
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 5.0  # τ of the softmax weightings
    aggregate: Aggregate = "bands"  # the paper: models
    start: Literal["whole", "smallest"] = "smallest"  # factorized layers: at the smallest tier's rank; the paper: whole
    form: Literal["spatial", "pufferfish"] = "spatial"  # k×1 and 1×k convolutions, or k×k and 1×1
    warmup: Annotated[int, Field(ge=0)] = 0  # rounds in which everybody trains the full model

    def build(self, model: nn.Module, setup: Setup) -> "FedHM":
        return FedHM(model, self, setup)

    @property
    def unbounded(self) -> str:
        return unbounded(self.aggregate, self.weighting)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [
            NamedEntry("fedhm", lambda sizes: sizes.fedhm),
            NamedEntry("fedhm-paper", lambda sizes: {**sizes.fedhm, **PAPER}),
            NamedEntry("fedhm-updates", lambda sizes: {**sizes.fedhm, **PAPER, "aggregate": "updates"}),
            *(NamedEntry(f"fedhm-v{count + 1}", partial(_with_largest_replaced, count)) for count in (1, 2)),
            NamedEntry("pufferfish", _pufferfish),
            Family("lowrank", lambda sizes: sorted(set(sizes.ratios), reverse=True), _low_rank, tier_name),
        ]

    @property
    def shares(self) -> Sequence[float]:
        return self.tiers

    @property
    def rank_ratios(self) -> Sequence[float]:
        return self.tiers

    @property
    def column(self) -> str:
        """Return the column that runs of one low-rank tier on all clients share; empty for any other run."""
        return "lowrank" if len(set(self.tiers)) == 1 and (self.form, self.warmup) == ("spatial", 0) else ""

    @property
    def remark(self) -> str:
        return f"averages {self.aggregate}"

    def in_setting(self, heterogeneity: str) -> Settings:
        """Return the paper's weighting for fixed or dynamic tiers."""
        return {"weighting": "softmax" if heterogeneity == "dynamic" else "uniform"}


def _with_largest_replaced(count: int, sizes: Sizes) -> Settings:
    return {**sizes.fedhm, "tiers": replace_largest(sizes.ratios, count, f"fedhm-v{count + 1}")}


def _low_rank(sizes: Sizes, ratio: float | str) -> Settings:
    """Return the settings with which FedHM trains one tier on all clients."""
    return {"name": "fedhm", "tiers": [ratio], "keep": sizes.keep, **PAPER}


def _pufferfish(sizes: Sizes) -> Settings:
    return {**_low_rank(sizes, min(sizes.ratios)), "form": "pufferfish", "warmup": max(1, sizes.rounds // 10)}


@dataclass(frozen=True)
class FedHMState(State):
    weights: Tensors  # the full model
    factors: dict[str, Factors]  # by layer, its decomposition at the largest rank that any tier asks for


class FedHM(Method[FedHMState]):
    state_type = FedHMState
    recovers = one_model = True

    def __init__(self, model: nn.Module, config: FedHMConfig, setup: Setup = Setup()) -> None:
        self.config, self._setup = config, setup
        self.levels = tuple(tier_name(ratio) for ratio in sorted(config.tiers, reverse=True))
        self.tiers = tuple(dict.fromkeys(self.levels))
        # by network; the full one is there for the warm-up, whatever the tiers
        self.ratios = {FULL: 1.0} | {tier_name(ratio): ratio for ratio in config.tiers}
        settled = config.keep, setup.classifier, config.form
        self.plans = {name: tier_plan(model, ratio, *settled) for name, ratio in self.ratios.items()}
        if min(_weight(config, ratio, 1) for ratio in config.tiers) < 1e-30:  # beyond what float32 can sum
            raise FedhmError(f"method.temperature = {config.temperature:g} leaves the smallest tier without weight")
        self._model, self._nested = model, setup.nested if config.aggregate == "bands" else None
        plans, layers = self.plans.values(), dict.fromkeys(layer for plan in self.plans.values() for layer in plan)
        # the largest rank that any tier asks for
        self._largest = {layer: max(plan.get(layer, 0) for plan in plans) for layer in layers}

    def start(self, weights: Tensors) -> FedHMState:
        factors, _ = self._factorized(weights)
        if self.config.start == "smallest" and not self.config.warmup:  # which is to find the best directions
            for layer, rank in self.plans[self.tiers[-1]].items():
                factors[layer] = factors[layer].cut(rank)
                cut = roll(factors[layer].left @ factors[layer].right, weights[f"{layer}.weight"].shape)
                weights = {**weights, f"{layer}.weight": cut}
        return FedHMState(weights, factors)

    def tasks(self, state: FedHMState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        warm = round_number <= self.config.warmup
        tiers = [FULL if warm else p.tier for p in participants]
        sent = {tier: self._sent(state, tier, nested=not warm) for tier in set(tiers)}
        for p, tier in zip(participants, tiers, strict=True):
            kind, network, tensors = sent[tier]
            yield Task(kind, round_number, p.client, p.tier, network, tensors)

    def _sent(self, state: FedHMState, tier: str, *, nested: bool) -> tuple[str, str, Tensors]:
        """Return what a tier's clients are to do, with which network, and its tensors."""
        weights = self.weights(state, tier)
        smaller = self._smaller(tier) if nested and self._nested else []
        if not smaller:
            return "train", tier, weights
        layers = {layer for plan in smaller for layer in plan} - self.plans[tier].keys()
        ranks = {layer: max(plan.get(layer, 0) for plan in smaller) for layer in sorted(layers)}
        bases = {f"{BASIS}{layer}": directions(state.factors[layer]).left[:, :r] for layer, r in ranks.items()}
        return "nested", f"{NESTED}{tier}", weights | bases

    def _smaller(self, tier: str) -> list[RankPlan]:
        """Return the rank plans of the tiers inside another."""
        return [self.plans[name] for name in self.tiers[self.tiers.index(tier) + 1 :]]

    def merge(self, state: FedHMState, updates: Iterable[Update], round_number: int) -> FedHMState:
        how = (self.config.aggregate, self.config.form, self._setup.classifier, self._setup.make_mean)
        mean = RecoveredMean(state.weights, state.factors, *how)
        samples: list[int] = []
        for update in updates:
            tier = update.network.removeprefix(NESTED)
            samples.append(update.samples)
            mean.fold(update, tier, self.plans[tier], _weight(self.config, self.ratios[tier], update.samples))
        if self.config.aggregate == "models" and samples and not mean.folded & {FULL, self.tiers[0]}:
            # published code: without a client of the largest tier, the server's own model is one more
            mean.fold_own(_weight(self.config, 1.0, sum(samples) // len(samples)))
        weights, unrolled = mean.result()
        kappa_1, kappa_2 = layer_constants(state.weights, state.factors, mean.ranks, self.config.form)
        diagnostics = {"kappa_uv": mean.kappa_uv, "kappa_sigma1": kappa_1, "kappa_sigma2": kappa_2}
        if self._setup.optimizer_follows:  # what it leaves of the mean is to be decomposed
            return FedHMState(weights, state.factors, diagnostics=diagnostics)
        return self._decomposed(weights, unrolled, state, diagnostics)

    def settle(self, state: FedHMState, before: FedHMState) -> FedHMState:
        return self._decomposed(state.weights, {}, before, state.diagnostics)

    def _decomposed(
        self, weights: Tensors, unrolled: Tensors, before: FedHMState, diagnostics: dict[str, float]
    ) -> FedHMState:
        factors, exact = self._factorized(weights, unrolled, before.factors)
        shares = tier_energies(weights, factors, {tier: self.plans[tier] for tier in self.tiers if tier != FULL})
        energies = {f"energy_beyond/{tier}": share for tier, share in shares.items()}
        return FedHMState(weights, factors, diagnostics={**diagnostics, "exact_decompositions": exact, **energies})

    def network(self, name: str) -> nn.Module:
        tier = name.removeprefix(NESTED)
        network = to_hybrid(self._model, self.plans[tier], spectral=False)
        if tier == name or self._nested is None:
            return network
        plans = self._smaller(tier)
        smaller = [to_hybrid(self._model, plan, spectral=False) for plan in plans]
        return contain(network, Inside(smaller, plans), *self._nested)

    def weights(self, state: FedHMState, tier: str) -> Tensors:
        plan = self.plans[tier]
        tensors = {name: t for name, t in state.weights.items() if name.removesuffix(".weight") not in plan}
        for layer, rank in plan.items():
            shape = state.weights[f"{layer}.weight"].shape
            tensors[f"{layer}.u"], tensors[f"{layer}.v"] = split(*state.factors[layer].prefix(rank), shape)
        return tensors

    def _factorized(
        self, weights: Tensors, unrolled: Mapping[str, Tensor] = {}, before: Mapping[str, Factors] | None = None
    ) -> tuple[dict[str, Factors], int]:
        """Return one decomposition per layer, at the largest rank, and how many of them were not found from `before`.

        Smaller tiers are its leading columns. `before` has those of the round before, from which most are found.
        """

        def factors_of(layer: str) -> tuple[Factors, bool]:
            name = f"{layer}.weight"
            matrix = unrolled[name] if name in unrolled else unroll(weights[name], self.config.form)
            return decompose(matrix, self._largest[layer], before[layer] if before else None)

        found = side_by_side(factors_of, list(self._largest))
        contiguous = [Factors(*(tensor.contiguous() for tensor in factors)) for factors, _ in found]
        return dict(zip(self._largest, contiguous, strict=True)), sum(exact for _, exact in found)


def _weight(config: FedHMConfig, ratio: float, samples: int) -> float:
    """Return αₚ up to a factor, which the mean divides out; the exponents are at most 0, so nothing overflows."""
    if config.weighting == "softmax":  # the paper: softmax(γ / τ)
        return math.exp((ratio - 1) / config.temperature)
    if config.weighting == "softmax-inverse":  # published code: softmax(−(1 / γ) / τ)
        return math.exp((1 - 1 / ratio) / config.temperature)
    return float(samples) if config.weighting == "samples" else 1.0


ENTRY_POINT = FedHMConfig
