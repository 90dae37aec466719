"""FedHM: every tier trains a hybrid network at its own ranks; the server recovers, averages, factorizes again.

The state is the full model W, one decomposition L R of every factorized layer at the largest rank that any tier asks
for, and the rank plan of every tier. Round t:

    tasks    tier γ gets the dense layers of W and the first r_γ directions of L R
    merge    W ← Σ αₚ recoveredₚ / Σ αₚ,  recoveredₚ = Uₚ Vₚᵀ or the dense weight of a full client     (models)
             W ← W + Σ αₚ (recoveredₚ − sentₚ) / Σ αₚ                                                (updates)
             the same, each band of a change averaged over the clients whose rank reaches it         (bands)
             L R ← the decomposition of W, found from that of the round before
             one tier only: L ← Σ αₚ Uₚ / Σ αₚ,  R ← Σ αₚ Vₚᵀ / Σ αₚ,  W ← L R                       (factors)

The paper averages models. Directions beyond a tier's rank then shrink in every round, by the share of the clients that
cannot carry them. Averaging updates leaves these directions alone, but trains them at that share of the speed.
Averaging by bands can move them as fast as if the clients that carry them were alone. These clients are few, so their
mean is noisy; the default is half-way (`band_speed`). By bands, clients of larger tiers also train smaller tiers inside
their networks (`train.nested`), so that a smaller tier's network is one that was trained, not the rest of a truncation.

Averaging factors is FedAvg of one hybrid network. FedHM's published code does it where all clients have the same rank.

A step on factors moves their product by η (G V Vᵀ + U Uᵀ G): the larger the factors, the longer the step, and the
larger the factors after it. In long local training on few labels this grows without end, first in factorized layers
that no normalisation follows. So clients limit the length of a step (`STABLE_STEP`), unless the settings say otherwise.

In warm-up rounds every tier trains the full network, with the weight of γ = 1: the best directions are found before
anything is cut off.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal, Protocol, Self

from pydantic import Field, model_validator
from torch import nn

from fedhm.config.method import STABLE_STEP, Change, Family, MethodConfig, NamedEntry, Settings, Sizes, replace_largest
from fedhm.config.section import Positive, Tiers, tier_name
from fedhm.data.sources import published_normalisation
from fedhm.errors import FedhmError
from fedhm.lowrank.average import Aggregate, singular_directions
from fedhm.lowrank.diagnostics import largest_norm, layer_constants, tier_energies
from fedhm.lowrank.hybrid import NestedTiers, nest_tiers, to_hybrid
from fedhm.lowrank.layers import dense_weight_name, module_of
from fedhm.lowrank.plan import RankPlan
from fedhm.lowrank.svd import (
    Factors,
    looks_untrained,
    product_spectrum,
    roll,
    squared_norm,
    to_layer_factors,
    to_matrix_factors,
)
from fedhm.methods.means import AbsentLabels, RecoveredMean, factorized, for_ranks, unbounded
from fedhm.methods.method import Method, Setup, State
from fedhm.methods.plans import FULL, TierPlan, TierPlanner, has_budgets
from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.networks.structure import after_normalisation
from fedhm.work.messages import Participant, Task, TaskOptions, Update
from fedhm.work.nested import BASIS


class FedHMConfig(MethodConfig):
    by_coordinate: ClassVar[bool] = True
    analysed: ClassVar[bool] = True
    name: Literal["fedhm"] = "fedhm"
    tiers: Tiers = (1.0, 1 / 2, 1 / 4, 1 / 8)  # or budgets, "memory:128MB", or shares, "50%"; listed twice: two levels
    replan: tuple[Positive, ...] = ()  # of budgets: rounds after which the spectrum decides on ranks again
    keep: Annotated[int, Field(ge=0)] = 1  # the paper's ρ
    dense: tuple[str, ...] = ()  # layers, or modules with layers, that stay dense; "*.shortcut" means all such names
    max_rank: Annotated[int, Field(ge=0)] = 0  # of any layer, whatever the ratio; 0: no limit
    weighting: Literal["uniform", "samples", "softmax", "softmax-inverse"] = "uniform"
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 5.0  # τ of the softmax weightings
    aggregate: Literal[Aggregate, "factors"] = "bands"  # the paper: models; factors: if all clients have one tier
    absent_labels: AbsentLabels = "leave-out"  # classifier rows of labels that a client lacks; published code: zero
    band_speed: Annotated[float, Field(ge=0, le=1)] = 0.5  # of the directions beyond the smallest rank
    # factorized layers: as they are, cut to the smallest tier's rank, or with the directions of that rank raised to
    # the norm of the layer; auto: raised behind the last normalisation layer, in untrained models averaged by bands
    start: Literal["auto", "whole", "smallest", "raised"] = "auto"
    form: Literal["spatial", "pufferfish"] = "spatial"  # k×1 and 1×k convolutions, or k×k and 1×1
    warmup: Annotated[int, Field(ge=0)] = 0  # rounds in which everybody trains the full model

    @model_validator(mode="after")
    def _check_budgets(self) -> Self:
        if self.replan and not has_budgets(self.tiers):
            raise ValueError("replan is for tiers that are budgets, such as tiers = ['memory:128MB']")
        if self.max_rank and has_budgets(self.tiers):
            raise ValueError("max_rank is for tiers that are ratios: a budget chooses its own ranks")
        return self

    @model_validator(mode="after")
    def _check_aggregate(self) -> Self:
        if self.aggregate == "factors" and (len(set(self.tiers)) > 1 or self.replan):
            raise ValueError(
                "aggregate = 'factors' averages factors of one shape: let all clients have one tier, without replan"
            )
        if self.absent_labels == "zero" and self.aggregate not in ("models", "factors"):
            raise ValueError(
                "absent_labels = 'zero' counts rows of zeros in a mean of models, and aggregate = "
                f"'{self.aggregate}' averages changes: set aggregate = 'models'"
            )
        return self

    def build(self, model: nn.Module, setup: Setup) -> "FedHM":
        return FedHM(model, self, setup)

    def clip_norm(self, lr: float) -> float:
        return STABLE_STEP / lr

    @property
    def unbounded(self) -> str:
        if self.aggregate == "factors":
            return (
                "method.aggregate = 'factors' averages factors, whose bounds do not bound their product: set 'updates'"
            )
        if self.absent_labels == "zero":
            return "method.absent_labels = 'zero' takes back other clients' rows: set 'leave-out'"
        return unbounded(self.aggregate, self.weighting)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return ENTRIES

    @property
    def shares(self) -> Sequence[float]:
        if not any(isinstance(tier, str) for tier in self.tiers):
            return self.rank_ratios
        places = {tier: len(self.tiers) - place for place, tier in reversed(list(enumerate(self.tiers)))}
        return [places[tier] for tier in self.tiers]  # largest first, whatever budgets and shares afford

    @property
    def rank_ratios(self) -> Sequence[float]:
        return tuple(tier for tier in self.tiers if not isinstance(tier, str))

    @property
    def column(self) -> str:
        """Return the column that runs of one low-rank tier on all clients share; empty for any other run."""
        if len(set(self.tiers)) > 1 or (self.form, self.warmup) != ("spatial", 0):
            return ""
        return "lowrank-published" if self.aggregate == "factors" else "lowrank"

    @property
    def remark(self) -> str:
        return f"averages {self.aggregate}"

    def in_setting(self, heterogeneity: str) -> Settings:
        """Return the paper's weighting for fixed or dynamic tiers."""
        return {"weighting": "softmax" if heterogeneity == "dynamic" else "uniform"}


@dataclass(frozen=True)
class FedHMState(State):
    weights: Tensors  # the full model
    factors: dict[str, Factors]  # by layer, its decomposition at the largest rank that any tier asks for
    plans: dict[str, TierPlan]  # by tier; the full network's among them
    round: int = 0  # the last round that was merged


class FedHM(Method[FedHMState]):
    state_type = FedHMState
    one_model = True

    def __init__(self, model: nn.Module, config: FedHMConfig, setup: Setup = Setup()) -> None:
        self.config, self._setup, self._model = config, setup, model
        self.planner = TierPlanner(model, setup, config.tiers, config.keep, config.form, config.max_rank, config.dense)
        self.levels, self.tiers = self.planner.levels, self.planner.tiers
        self._nested = setup.nested if config.aggregate == "bands" else None
        self.recovers = config.aggregate != "factors"
        if config.aggregate == "factors" and setup.optimizer_follows:
            raise FedhmError(
                "method.aggregate = 'factors' keeps the clients' mean as factors, and the server's optimizer or its "
                "noise would change their product: set server.optimizer = 'none', without [privacy] at the server"
            )
        if min(weight_of(config, ratio, 1) for ratio in self.planner.ratios.values()) < 1e-30:  # float32 would lose it
            raise FedhmError(f"method.temperature = {config.temperature:g} leaves the smallest tier without weight")

    def start(self, weights: Tensors) -> FedHMState:
        plans = self.planner.first
        factors, _ = factorized(weights, _ranks(plans), self.config.form)
        smallest = plans[self.tiers[-1]].ranks
        for layer in self._changed_at_start(weights, factors) & smallest.keys():
            name, before, rank = dense_weight_name(layer), factors[layer], smallest[layer]
            weight = weights[name]
            if self.config.start == "smallest":
                factors[layer] = before.cut(rank)
                weight = roll(factors[layer].left @ factors[layer].right, weight.shape)
            else:
                factors[layer] = before.raised(rank, math.sqrt(squared_norm(weight)))
                (left, right), (old_left, old_right) = factors[layer].prefix(rank), before.prefix(rank)
                weight = weight + roll(left @ right - old_left @ old_right, weight.shape)
            weights = {**weights, name: weight}
        return FedHMState(weights, factors, plans)

    def _changed_at_start(self, weights: Tensors, factors: Mapping[str, Factors]) -> Set[str]:
        """Return the factorized layers that are cut or raised before the first round.

        Truncated random weights are smaller than whole ones. A normalisation layer behind them makes up for that.
        Without one, a small tier's signals fade from layer to layer, and it learns slowly. Trained weights are only
        changed if the settings say so.
        """
        start, form = self.config.start, self.config.form
        if start == "whole" or self.config.warmup:  # a warm-up is to find the best directions
            return set()
        if start != "auto":
            return factors.keys()
        untrained = all(looks_untrained(weights[dense_weight_name(n)], f.spectrum, form) for n, f in factors.items())
        if not untrained or self.config.aggregate != "bands":
            return set()
        behind = set(after_normalisation(self._model))
        frozen = {name for name, parameter in self._model.named_parameters() if not parameter.requires_grad}
        return {n for n in factors if module_of(n) in behind and dense_weight_name(n) not in frozen}

    def tasks(self, state: FedHMState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        warm = round_number <= self.config.warmup
        trained = [FULL if warm else p.tier for p in participants]
        sent = {tier: self._task_of_tier(state, tier, round_number, nested=not warm) for tier in set(trained)}
        for p, tier in zip(participants, trained, strict=True):
            yield replace(sent[tier], client=p.client, tier=p.tier)

    def _task_of_tier(self, state: FedHMState, tier: str, round_number: int, *, nested: bool) -> Task:
        """Return the task of a tier's clients; client and tier are to be filled in."""
        spec, weights, options = self.spec(tier, state), self.weights(state, tier), self.training_options(state, tier)
        inside = tuple(self.spec(each, state) for each in self._trained_inside(tier)) if nested else ()
        if not inside:
            return Task("train", round_number, -1, tier, spec, weights, options=options)
        # layers that are dense in this tier and factorized in a smaller one: a client needs the directions to cut at
        largest: dict[str, int] = {}
        for layer, rank in (pair for each in inside for pair in each.ranks):
            largest[layer] = max(rank, largest.get(layer, 0))
        dense = sorted(largest.keys() - dict(spec.ranks).keys())
        bases = {
            f"{BASIS}{layer}": singular_directions(state.factors[layer]).left[:, : largest[layer]] for layer in dense
        }
        label = f"nested {'|'.join(map(str, (spec, *inside))) if self.planner.has_budgets else spec}"
        network = replace(spec, label=label, inside=inside)
        return Task("nested", round_number, -1, tier, network, weights | bases, options=options)

    def _trained_inside(self, tier: str) -> Sequence[str]:
        """Return the smaller tiers that are trained inside a tier's network."""
        smaller = self.tiers[self.tiers.index(tier) + 1 :] if self._nested else ()
        return smaller[-1:] if self._setup.nested_tier == "smallest" else smaller

    def merge(self, state: FedHMState, updates: Iterable[Update], round_number: int) -> FedHMState:
        aggregate = self.config.aggregate
        if aggregate == "factors" and round_number > self.config.warmup:
            return self._with_averaged_factors(state, updates, round_number)
        mean = RecoveredMean(
            state.weights,
            state.factors,
            "models" if aggregate == "factors" else aggregate,
            self.config.form,
            self._setup.output_layers,
            self._setup.make_mean,
            self.config.band_speed,
            self.config.absent_labels,
        )
        samples: list[int] = []
        for update in updates:
            plan = state.plans[update.network.tier]
            weight = weight_of(self.config, plan.ratio, update.samples) * update.weight
            mean.add(update, update.network.tier, plan.ranks, weight)
            samples.append(update.samples)
        if aggregate == "models" and samples and not mean.tiers & {FULL, self.tiers[0]}:
            # published code: without a client of the largest tier, the server's own model is one more
            mean.add_server_model(weight_of(self.config, 1.0, sum(samples) // len(samples)))
        weights, unrolled = mean.result()
        diagnostics = self._constants(state, mean.ranks, mean.kappa_uv)
        merged = replace(state, weights=weights, diagnostics=diagnostics, round=round_number)
        if self._setup.optimizer_follows:  # it changes the mean, and then `refresh_derived` decomposes it
            return merged
        return self._decomposed(merged, unrolled)

    def _with_averaged_factors(self, state: FedHMState, updates: Iterable[Update], round_number: int) -> FedHMState:
        """Return the state with the plain mean of the clients' hybrid networks: nothing is recovered or decomposed."""
        tier = self.tiers[0]
        plan = state.plans[tier]
        mean = self._setup.make_mean(self.weights(state, tier))
        ranks: list[Mapping[str, int]] = []
        kappa_uv = 0.0
        for update in updates:
            weight = weight_of(self.config, plan.ratio, update.samples) * update.weight
            mean.add_all(update, weight, self._setup.output_layers, for_ranks(self.config.absent_labels, plan.ranks))
            both = (update.tensors[f"{layer}.{part}"] for layer in plan.ranks for part in ("u", "v"))
            kappa_uv = max(kappa_uv, largest_norm(both))
            ranks.append(plan.ranks)
        hybrid = mean.result()
        weights = {name: hybrid.get(name, old) for name, old in state.weights.items()}
        factors: dict[str, Factors] = {}
        for layer in plan.ranks:
            pair = to_matrix_factors(hybrid[f"{layer}.u"], hybrid[f"{layer}.v"])
            left, right = (factor.contiguous() for factor in pair)
            factors[layer] = Factors(left, right, product_spectrum(left, right))
            name = dense_weight_name(layer)
            weights[name] = roll(left @ right, weights[name].shape)
        diagnostics = self._constants(state, ranks, kappa_uv) | self._energies(weights, factors, state.plans)
        return replace(state, weights=weights, factors=factors, diagnostics=diagnostics, round=round_number)

    def _constants(self, state: FedHMState, ranks: Sequence[Mapping[str, int]], kappa_uv: float) -> dict[str, float]:
        """Return the constants of the paper's bound, from the decomposition that the round began with."""
        kappa_1, kappa_2 = layer_constants(state.weights, state.factors, ranks, self.config.form)
        return {"kappa_uv": kappa_uv, "kappa_sigma1": kappa_1, "kappa_sigma2": kappa_2}

    def _energies(
        self, weights: Tensors, factors: Mapping[str, Factors], plans: Mapping[str, TierPlan]
    ) -> dict[str, float]:
        smaller = {tier: plans[tier].ranks for tier in self.tiers if tier != FULL}
        return {f"energy_beyond/{t}": e for t, e in tier_energies(weights, factors, smaller).items()}

    def refresh_derived(self, state: FedHMState, before: FedHMState) -> FedHMState:
        return self._decomposed(state, {})

    def _decomposed(self, state: FedHMState, unrolled: Tensors) -> FedHMState:
        """Return the state with its weights decomposed, starting from the factors of the round before."""
        before: Mapping[str, Factors] | None = state.factors
        if self.planner.has_budgets and state.round in {*self.config.replan, self.config.warmup}:
            state, before = replace(state, plans=self.planner.plan(state.weights)), None  # of other ranks
        factors, exact = factorized(state.weights, _ranks(state.plans), self.config.form, unrolled, before)
        energies = self._energies(state.weights, factors, state.plans)
        diagnostics = {**state.diagnostics, "exact_decompositions": exact, **energies}
        return replace(state, factors=factors, diagnostics=diagnostics)

    def spec(self, tier: str, state: FedHMState | None = None) -> NetworkSpec:
        plan = (state.plans if state else self.planner.first)[tier]
        return NetworkSpec(tier, self.planner.label(tier, plan), ranks=tuple(plan.ranks.items()))

    def network(self, spec: NetworkSpec) -> nn.Module:
        network = self._hybrid(spec)
        if not spec.inside or self._nested is None:
            return network
        own, smaller = self._nested
        plans = [self._rank_plan(each) for each in spec.inside]
        return nest_tiers(network, NestedTiers([self._hybrid(each) for each in spec.inside], plans), own, smaller)

    def _hybrid(self, spec: NetworkSpec) -> nn.Module:
        return to_hybrid(self._model, self._rank_plan(spec), spectral=False)

    def _rank_plan(self, spec: NetworkSpec) -> RankPlan:
        return RankPlan(dict(spec.ranks), self.config.form)

    def weights(self, state: FedHMState, tier: str) -> Tensors:
        """Return a hybrid network's tensors: the leading directions of its factorized layers, all else as it is."""
        ranks = state.plans[tier].ranks
        names = {layer: dense_weight_name(layer) for layer in ranks}
        factored = set(names.values())
        tensors = {name: t for name, t in state.weights.items() if name not in factored}
        for layer, rank in ranks.items():
            shape = state.weights[names[layer]].shape
            left, right = state.factors[layer].prefix(rank)
            tensors[f"{layer}.u"], tensors[f"{layer}.v"] = to_layer_factors(left, right, shape)
        return tensors

    def full_spec(self) -> NetworkSpec:
        return self.spec(FULL)

    def remarks(self) -> Sequence[str]:
        return self.planner.remarks

    def planned_ranks(self, state: FedHMState) -> dict[str, dict[str, int]]:
        return {tier: state.plans[tier].ranks for tier in self.tiers if self.planner.is_budget(tier)}

    def training_options(self, state: FedHMState, tier: str) -> TaskOptions:
        return state.plans[tier].options if tier in state.plans else TaskOptions()


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


def _ranks(plans: Mapping[str, TierPlan]) -> list[dict[str, int]]:
    return [plan.ranks for plan in plans.values()]


# FedHM's names in comparisons: as it is by default, as in the paper, as in published code, and with one size for all
# clients.

PAPER: Settings = {"aggregate": "models", "start": "whole", "absent_labels": "leave-out"}
PUBLISHED_FACTORS: Settings = {"aggregate": "factors", "absent_labels": "count"}  # FedAvg of one hybrid network


def _paper_changes(sizes: Sizes) -> Sequence[Change]:
    """Return the settings outside [method] that belong to the paper's rule: it does not clip gradients."""
    clips = sizes.config.train.clip_norm == "auto" and sizes.config.objective.has_labels
    return [Change("train", "clip_norm", 0.0)] if clips else []


def _default_changes(sizes: Sizes) -> Sequence[Change]:
    """Return the library's limit on gradients, if the config has switched it off for the paper's rule."""
    return [Change("train", "clip_norm", "auto")] if sizes.config.train.clip_norm == 0 else []


def _published(sizes: Sizes) -> Settings:
    """Return the settings of published code. With one tier for all clients, it averages the factors."""
    dynamic = sizes.config.federation.heterogeneity == "dynamic"
    weighting = {"weighting": "softmax-inverse" if dynamic else "uniform"}
    one_tier = len(set(sizes.fedhm["tiers"])) == 1 and not sizes.fedhm["replan"]
    return {**sizes.fedhm, **PAPER, **weighting, **(PUBLISHED_FACTORS if one_tier else {"absent_labels": "zero"})}


def _published_changes(sizes: Sizes) -> Iterator[Change]:
    """Yield the settings of published code outside [method], as far as the config's model and data have them."""
    data, model, train = sizes.config.data, sizes.config.model, sizes.config.train
    yield from _paper_changes(sizes)
    yield Change("train", "decay_factors", True)
    if not train.frozen_statistics:
        yield Change("evaluation", "statistics", "test-batch")
    if model and model.has_init:
        yield Change("model", "init", "fan-in")
    if data and data.partition == "dirichlet":
        yield Change("data", "partition", "dirichlet-feddf")
    if data and published_normalisation(data.source):
        yield Change("data", "normalisation", "published")


def _defaults(sizes: Sizes) -> Settings:
    """Return the library's defaults with the config's tiers and weighting, for configs that follow the paper's rule."""
    kept = ("tiers", "replan", "keep", "dense", "max_rank", "weighting", "temperature")
    given = {key: sizes.fedhm[key] for key in kept}
    return {**FedHMConfig().model_dump(mode="json"), **given}


def _with_largest_replaced(count: int, sizes: Sizes) -> Settings:
    given = sizes.fedhm
    named = any(isinstance(tier, str) for tier in given["tiers"])  # budgets and shares are in order already
    levels = given["tiers"] if named else sizes.ratios
    tiers = replace_largest(levels, count, f"fedhm-v{count + 1}")
    return {**given, "tiers": tiers, "replan": given["replan"] if has_budgets(tiers) else []}


def _low_rank(sizes: Sizes, ratio: float | str) -> Settings:
    """Return the settings with which FedHM trains one tier on all clients."""
    dense = {"dense": sizes.fedhm["dense"]} if sizes.fedhm.get("dense") else {}
    return {"name": "fedhm", "tiers": [ratio], "keep": sizes.keep, **dense, **PAPER}


def _low_rank_published(sizes: Sizes, ratio: float | str) -> Settings:
    return {**_low_rank(sizes, ratio), **PUBLISHED_FACTORS}


def _ratios(sizes: Sizes) -> Sequence[float]:
    return sorted(set(sizes.ratios), reverse=True)


def _pufferfish(sizes: Sizes) -> Settings:
    return {**_low_rank(sizes, min(sizes.ratios)), "form": "pufferfish", "warmup": max(1, sizes.rounds // 10)}


ENTRIES: Sequence[NamedEntry | Family] = [
    NamedEntry("fedhm", lambda sizes: sizes.fedhm),
    NamedEntry("fedhm-paper", lambda sizes: {**sizes.fedhm, **PAPER}, _paper_changes),
    NamedEntry("fedhm-updates", lambda sizes: {**sizes.fedhm, **PAPER, "aggregate": "updates"}, _paper_changes),
    NamedEntry("fedhm-published", _published, lambda sizes: list(_published_changes(sizes))),
    NamedEntry("fedhm-default", _defaults, _default_changes),
    *(NamedEntry(f"fedhm-v{count + 1}", partial(_with_largest_replaced, count)) for count in (1, 2)),
    NamedEntry("pufferfish", _pufferfish),
    Family("lowrank", _ratios, _low_rank, tier_name),
    Family("lowrank-published", _ratios, _low_rank_published, tier_name, lambda sizes: list(_published_changes(sizes))),
]

ENTRY_POINT = FedHMConfig
