"""What FedHM's server carries from round to round, and how much each update counts."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal, Protocol, Self

from pydantic import Field, model_validator
from torch import nn

from fedhm.config.method import Family, MethodConfig, NamedEntry, Settings, Sizes, replace_largest
from fedhm.config.section import Positive, Tiers, tier_name
from fedhm.config.units import parse_budget
from fedhm.errors import FedhmError
from fedhm.lowrank.average import singular_directions
from fedhm.lowrank.diagnostics import layer_constants, tier_energies
from fedhm.lowrank.hybrid import NestedTiers, nest_tiers, to_hybrid
from fedhm.lowrank.plan import RankPlan
from fedhm.lowrank.svd import Factors, roll, to_layer_factors
from fedhm.methods.budgets import Planned, TierBudgets, budgets_of, tier_plan
from fedhm.methods.means import Aggregate, RecoveredMean, factorized, unbounded
from fedhm.methods.method import Method, Setup, State
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Participant, Task, Update
from fedhm.work.nested import BASIS


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
    """Return the tensors of a hybrid network: the leading directions of a plan's layers, all else as it is."""
    tensors = {name: t for name, t in state.weights.items() if name.removesuffix(".weight") not in plan}
    for layer, rank in plan.items():
        shape = state.weights[f"{layer}.weight"].shape
        tensors[f"{layer}.u"], tensors[f"{layer}.v"] = to_layer_factors(*state.factors[layer].prefix(rank), shape)
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


# The names of FedHM in comparisons: as it is by default, as in the paper, and with one size for all clients.

PAPER: Settings = {"aggregate": "models", "start": "whole"}


def _with_largest_replaced(count: int, sizes: Sizes) -> Settings:
    given = sizes.fedhm
    levels = given["tiers"] if budgets_of(given["tiers"]) else sizes.ratios
    tiers = replace_largest(levels, count, f"fedhm-v{count + 1}")
    return {**given, "tiers": tiers, "replan": given["replan"] if budgets_of(tiers) else []}


def _low_rank(sizes: Sizes, ratio: float | str) -> Settings:
    """Return the settings with which FedHM trains one tier on all clients."""
    return {"name": "fedhm", "tiers": [ratio], "keep": sizes.keep, **PAPER}


def _pufferfish(sizes: Sizes) -> Settings:
    return {**_low_rank(sizes, min(sizes.ratios)), "form": "pufferfish", "warmup": max(1, sizes.rounds // 10)}


ENTRIES: Sequence[NamedEntry | Family] = [
    NamedEntry("fedhm", lambda sizes: sizes.fedhm),
    NamedEntry("fedhm-paper", lambda sizes: {**sizes.fedhm, **PAPER}),
    NamedEntry("fedhm-updates", lambda sizes: {**sizes.fedhm, **PAPER, "aggregate": "updates"}),
    *(NamedEntry(f"fedhm-v{count + 1}", partial(_with_largest_replaced, count)) for count in (1, 2)),
    NamedEntry("pufferfish", _pufferfish),
    Family("lowrank", lambda sizes: sorted(set(sizes.ratios), reverse=True), _low_rank, tier_name),
]


# FedHM: every tier trains a hybrid network at its own rank; the server recovers, averages, factorizes again.
#
# Round t, with the full model W and one decomposition L R of every factorized layer at the largest rank, found from
# the one of the round before:
#
#     tasks    tier γ gets the dense layers of W and the first r_γ directions of L R
#     merge    W ← Σ αₚ recoveredₚ / Σ αₚ,  recoveredₚ = Uₚ Vₚᵀ or the dense weight of a full client     (models)
#              W ← W + Σ αₚ (recoveredₚ − sentₚ) / Σ αₚ                                                (updates)
#              the same, each band of a change averaged over those whose rank reaches it               (bands)
#
# The paper averages models. Directions beyond a tier's rank then shrink every round by the share of the clients that
# could not carry them. Averaging updates leaves them alone, but trains them at that share of the speed; by bands they
# can move as fast as if those who can carry them, few and so noisy, were alone; the default is half-way
# (`band_speed`). There, clients of larger tiers also train smaller ones inside theirs (`train.nested`), so that a
# smaller tier's network is one that was trained, and not what truncation leaves.
#
# In warm-up rounds every tier trains the full network, with the weight of γ = 1: the best directions are found before
# anything is cut off.

FULL = tier_name(1)
INSIDE = "|"  # between the names of a network and those inside it
NESTED = "nested "  # before a tier: its network with the smaller tiers inside


class FedHMConfig(MethodConfig):
    by_coordinate: ClassVar[bool] = True
    name: Literal["fedhm"] = "fedhm"
    tiers: Tiers = (1.0, 1 / 2, 1 / 4, 1 / 8)  # or budgets: "memory:128MB"; one listed twice has two shares
    replan: tuple[Positive, ...] = ()  # of budgets: rounds after which the spectrum decides on ranks again
    keep: Annotated[int, Field(ge=0)] = 1  # the paper's ρ
    weighting: Literal["uniform", "samples", "softmax", "softmax-inverse"] = "uniform"
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 5.0  # τ of the softmax weightings
    aggregate: Aggregate = "bands"  # the paper: models
    band_speed: Annotated[float, Field(ge=0, le=1)] = 0.5  # of what lies beyond the smallest rank
    start: Literal["whole", "smallest"] = "whole"  # factorized layers: as they are, or at the smallest tier's rank
    form: Literal["spatial", "pufferfish"] = "spatial"  # k×1 and 1×k convolutions, or k×k and 1×1
    warmup: Annotated[int, Field(ge=0)] = 0  # rounds in which everybody trains the full model

    @model_validator(mode="after")
    def _replans_budgets(self) -> Self:
        if self.replan and not budgets_of(self.tiers):
            raise ValueError("replan is for tiers that are budgets, such as tiers = ['memory:128MB']")
        return self

    def build(self, model: nn.Module, setup: Setup) -> "FedHM":
        return FedHM(model, self, setup)

    @property
    def unbounded(self) -> str:
        return unbounded(self.aggregate, self.weighting)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return ENTRIES

    @property
    def shares(self) -> Sequence[float]:
        if not budgets_of(self.tiers):
            return self.rank_ratios
        places = {tier: len(self.tiers) - place for place, tier in reversed(list(enumerate(self.tiers)))}
        return [places[tier] for tier in self.tiers]  # largest first, whatever they come to

    @property
    def rank_ratios(self) -> Sequence[float]:
        return tuple(tier for tier in self.tiers if not isinstance(tier, str))

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


class FedHM(Method[FedHMState]):
    state_type: type[FedHMState] = FedHMState
    recovers = one_model = True

    def __init__(self, model: nn.Module, config: FedHMConfig, setup: Setup = Setup()) -> None:
        self.config, self._setup = config, setup
        planned = budgets_of(config.tiers)
        # budgets are listed by size: which affords more, only the model can tell
        ordered = config.tiers if planned else sorted(config.rank_ratios, reverse=True)
        self.levels = tuple(tier_name(tier) for tier in ordered)
        self.tiers = tuple(dict.fromkeys(self.levels))
        # by network; the full one is there for the warm-up, whatever the tiers
        self.ratios = {FULL: 1.0} | {tier_name(ratio): ratio for ratio in config.rank_ratios}
        settled = config.keep, setup.classifier, config.form
        self.plans = {name: tier_plan(model, ratio, *settled) for name, ratio in self.ratios.items()}
        given = {name: self.plans[name] if name in self.ratios else parse_budget(name) for name in self.tiers}
        self._budgets = TierBudgets(model, setup, given, config.keep, config.form) if planned else None
        self.state_type = PlannedState if planned else FedHMState
        if min(weight_of(config, ratio, 1) for ratio in self.ratios.values()) < 1e-30:  # beyond what float32 can sum
            raise FedhmError(f"method.temperature = {config.temperature:g} leaves the smallest tier without weight")
        self._model, self._nested = model, setup.nested if config.aggregate == "bands" else None

    def _plans_in(self, state: FedHMState) -> dict[str, RankPlan]:
        """Return the rank plan of every network, as the state has it."""
        if self._budgets is None or not isinstance(state, PlannedState):
            return self.plans
        return self.plans | {tier: self._budgets.plan(each.ranks) for tier, each in state.planned.items()}

    def start(self, weights: Tensors) -> FedHMState:
        planned = self._budgets.first if self._budgets else None
        state = FedHMState(weights, {}) if planned is None else PlannedState(weights, {}, planned)
        plans = self._plans_in(state)
        factors, _ = factorized(weights, plans.values(), self.config.form)
        if self.config.start == "smallest" and not self.config.warmup:  # which is to find the best directions
            for layer, rank in plans[self.tiers[-1]].items():
                factors[layer] = factors[layer].cut(rank)
                cut = roll(factors[layer].left @ factors[layer].right, weights[f"{layer}.weight"].shape)
                weights = {**weights, f"{layer}.weight": cut}
        return replace(state, weights=weights, factors=factors)

    def tasks(self, state: FedHMState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        warm = round_number <= self.config.warmup
        tiers = [FULL if warm else p.tier for p in participants]
        sent = {tier: self._sent(state, tier, nested=not warm) for tier in set(tiers)}
        for p, tier in zip(participants, tiers, strict=True):
            kind, network, tensors = sent[tier]
            yield Task(kind, round_number, p.client, p.tier, network, tensors, {}, self.training_options(state, tier))

    def _sent(self, state: FedHMState, tier: str, *, nested: bool) -> tuple[str, str, Tensors]:
        """Return what a tier's clients are to do, with which network, and its tensors."""
        weights = self.weights(state, tier)
        name, plans = self.network_name(state, tier), self._plans_in(state)
        inside = self._inside(tier) if nested else ()
        if not inside:
            return "train", name, weights
        smaller = [plans[each] for each in inside]
        layers = {layer for plan in smaller for layer in plan} - plans[tier].keys()
        ranks = {layer: max(plan.get(layer, 0) for plan in smaller) for layer in sorted(layers)}
        bases = {f"{BASIS}{layer}": singular_directions(state.factors[layer]).left[:, :r] for layer, r in ranks.items()}
        if self._budgets:  # the name says the ranks of all of them
            name = INSIDE.join([name, *(self.network_name(state, each) for each in inside)])
        return "nested", f"{NESTED}{name}", weights | bases

    def training_options(self, state: FedHMState, tier: str) -> Mapping[str, float]:
        return state.planned[tier].options if isinstance(state, PlannedState) and tier in state.planned else {}

    def _inside(self, tier: str) -> Sequence[str]:
        """Return the smaller tiers that are trained inside a tier's network."""
        smaller = self.tiers[self.tiers.index(tier) + 1 :] if self._nested else ()
        return smaller[-1:] if self._setup.nested_tier == "smallest" else smaller

    def network_name(self, state: FedHMState, tier: str) -> str:
        ranks = self.planned_ranks(state)
        return self.planned_name(tier, ranks[tier]) if tier in ranks else tier

    def planned_name(self, tier: str, ranks: Mapping[str, int]) -> str:
        return self._budgets.name(tier, ranks) if self._budgets else tier

    def planned_ranks(self, state: FedHMState) -> dict[str, dict[str, int]]:
        return {tier: each.ranks for tier, each in state.planned.items()} if isinstance(state, PlannedState) else {}

    def merge(self, state: FedHMState, updates: Iterable[Update], round_number: int) -> FedHMState:
        how = (self.config.aggregate, self.config.form, self._setup.classifier, self._setup.make_mean)
        mean = RecoveredMean(state.weights, state.factors, *how, self.config.band_speed)
        samples: list[int] = []
        plans, ratios = self._plans_in(state), dict(self.ratios)
        if self._budgets:
            ratios |= {tier: self._budgets.ratio(ranks) for tier, ranks in self.planned_ranks(state).items()}
        for update in updates:
            tier = update.network.removeprefix(NESTED).partition(INSIDE)[0].partition("=")[0]
            samples.append(update.samples)
            mean.fold(update, tier, plans[tier], weight_of(self.config, ratios[tier], update.samples))
        if self.config.aggregate == "models" and samples and not mean.folded & {FULL, self.tiers[0]}:
            # published code: without a client of the largest tier, the server's own model is one more
            mean.fold_own(weight_of(self.config, 1.0, sum(samples) // len(samples)))
        weights, unrolled = mean.result()
        kappa_1, kappa_2 = layer_constants(state.weights, state.factors, mean.ranks, self.config.form)
        diagnostics = {"kappa_uv": mean.kappa_uv, "kappa_sigma1": kappa_1, "kappa_sigma2": kappa_2}
        merged = replace(state, weights=weights, diagnostics=diagnostics)
        if isinstance(merged, PlannedState):
            merged = replace(merged, round=round_number)
        if self._setup.optimizer_follows:  # what it leaves of the mean is to be decomposed
            return merged
        return self._decomposed(merged, unrolled)

    def settle(self, state: FedHMState, before: FedHMState) -> FedHMState:
        return self._decomposed(state, {})

    def _decomposed(self, state: FedHMState, unrolled: Tensors) -> FedHMState:
        """Return the state with its weights decomposed, from the factors of the round before that it still has."""
        before: Mapping[str, Factors] | None = state.factors
        replanned = {*self.config.replan, self.config.warmup}
        if self._budgets and isinstance(state, PlannedState) and state.round in replanned:
            state, before = replace(state, planned=self._budgets.planned(state.weights)), None  # of other ranks
        plans = self._plans_in(state)
        factors, exact = factorized(state.weights, plans.values(), self.config.form, unrolled, before)
        shares = tier_energies(state.weights, factors, {tier: plans[tier] for tier in self.tiers if tier != FULL})
        energies = {f"energy_beyond/{tier}": share for tier, share in shares.items()}
        told = {**state.diagnostics, "exact_decompositions": exact, **energies}
        return replace(state, factors=factors, diagnostics=told)

    def network(self, name: str) -> nn.Module:
        own, *inside = name.removeprefix(NESTED).split(INSIDE)
        network = to_hybrid(self._model, self._plan_of_name(own), spectral=False)
        if not name.startswith(NESTED) or self._nested is None:
            return network
        if self._budgets is None:
            inside = list(self._inside(own))
        plans = [self._plan_of_name(each) for each in inside]
        smaller = [to_hybrid(self._model, plan, spectral=False) for plan in plans]
        return nest_tiers(network, NestedTiers(smaller, plans), *self._nested)

    def _plan_of_name(self, name: str) -> RankPlan:
        return self.plans[name] if self._budgets is None or name in self.plans else self._budgets.plan_of_name(name)

    def weights(self, state: FedHMState, tier: str) -> Tensors:
        return tensors_at(state, self._plans_in(state)[tier])


ENTRY_POINT = FedHMConfig
