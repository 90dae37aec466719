"""FedHM: every tier trains a hybrid network at its own rank; the server recovers, averages, factorizes again.

Round t, with the full model W and one decomposition L R of every factorized layer at the largest rank, found from the
one of the round before:

    tasks    tier γ gets the dense layers of W and the first r_γ directions of L R
    merge    W ← Σ αₚ recoveredₚ / Σ αₚ,  recoveredₚ = Uₚ Vₚᵀ or the dense weight of a full client     (models)
             W ← W + Σ αₚ (recoveredₚ − sentₚ) / Σ αₚ                                                (updates)

The paper averages models. Directions beyond a tier's rank then shrink every round by the share of the clients that
could not carry them; averaging updates leaves them alone.

In warm-up rounds every tier trains the full network, with the weight of γ = 1: the best directions are found before
anything is cut off.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from fedhm.config.method_config import Family, MethodConfig, NamedEntry, Settings, Sizes, replace_largest
from fedhm.config.section import Ratios, tier_name
from fedhm.errors import FedhmError
from fedhm.lowrank.diagnostics import Tail, energy_beyond, largest_norm, spectral_constants
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.layers import largest_rank
from fedhm.lowrank.plan import RankPlan
from fedhm.lowrank.svd import Factors, squared_norm
from fedhm.lowrank.unroll import join, split, unroll
from fedhm.lowrank.warm import decompose
from fedhm.machine.side_by_side import side_by_side
from fedhm.methods.mean import WeightedMean, trained_rows
from fedhm.methods.method import Method, Setup, State
from fedhm.methods.tier_plan import tier_plan
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Participant, Task, Update

FULL = tier_name(1)


class FedHMConfig(MethodConfig):
    name: Literal["fedhm"] = "fedhm"
    tiers: Ratios = (1.0, 1 / 2, 1 / 4, 1 / 8)  # one listed twice has two shares of the clients
    keep: Annotated[int, Field(ge=0)] = 1  # the paper's ρ
    weighting: Literal["uniform", "samples", "softmax", "softmax-inverse"] = "uniform"
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 5.0  # τ of the softmax weightings
    aggregate: Literal["models", "updates"] = "models"  # updates: directions that a tier cannot carry are left alone
    form: Literal["spatial", "pufferfish"] = "spatial"  # k×1 and 1×k convolutions, or k×k and 1×1
    warmup: Annotated[int, Field(ge=0)] = 0  # rounds in which everybody trains the full model

    def build(self, model: nn.Module, setup: Setup) -> "FedHM":
        return FedHM(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [
            NamedEntry("fedhm", lambda sizes: sizes.fedhm),
            NamedEntry("fedhm-updates", lambda sizes: {**sizes.fedhm, "aggregate": "updates"}),
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
    return {"name": "fedhm", "tiers": [ratio], "keep": sizes.keep}


def _pufferfish(sizes: Sizes) -> Settings:
    return {**_low_rank(sizes, min(sizes.ratios)), "form": "pufferfish", "warmup": max(1, sizes.rounds // 10)}


@dataclass(frozen=True)
class FedHMState(State):
    weights: Tensors  # the full model
    factors: dict[str, Factors]  # by layer, its decomposition at the largest rank that any tier asks for


class FedHM(Method[FedHMState]):
    state_type = FedHMState

    def __init__(self, model: nn.Module, config: FedHMConfig, setup: Setup = Setup()) -> None:
        self.config, self._setup = config, setup
        self.levels = tuple(tier_name(ratio) for ratio in sorted(config.tiers, reverse=True))
        self.tiers = tuple(dict.fromkeys(self.levels))
        # by network; the full one is there for the warm-up, whatever the tiers
        self.ratios = {FULL: 1.0} | {tier_name(ratio): ratio for ratio in config.tiers}
        settled = (config.keep, setup.classifier, config.form)
        self.plans = {name: tier_plan(model, ratio, *settled) for name, ratio in self.ratios.items()}
        if min(_weight(config, ratio, 1) for ratio in config.tiers) < 1e-30:  # beyond what float32 can sum
            raise FedhmError(f"method.temperature = {config.temperature:g} leaves the smallest tier without weight")
        self._model = model
        plans, layers = self.plans.values(), dict.fromkeys(layer for plan in self.plans.values() for layer in plan)
        # the largest rank that any tier asks for
        self._largest = {layer: max(plan.get(layer, 0) for plan in plans) for layer in layers}

    def start(self, weights: Tensors) -> FedHMState:
        factors, _ = self._factorized(weights)
        return FedHMState(weights, factors)

    def tasks(self, state: FedHMState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        warm = round_number <= self.config.warmup
        networks = [FULL if warm else p.tier for p in participants]
        sent = {name: self.weights(state, name) for name in set(networks)}
        for p, name in zip(participants, networks, strict=True):
            yield Task("train", round_number, p.client, p.tier, name, sent[name])

    def merge(self, state: FedHMState, updates: Iterable[Update], round_number: int) -> FedHMState:
        mean = WeightedMean(state.weights)
        weight_of_network: dict[str, float] = defaultdict(float)
        ranks: list[RankPlan] = []
        kappa_uv = 0.0
        for update in updates:
            plan = self.plans[update.network]
            weight = _weight(self.config, self.ratios[update.network], update.samples)
            weight_of_network[update.network] += weight
            ranks.append(plan)
            kappa_uv = max(kappa_uv, self._fold(mean, update, plan, weight))
        if self.config.aggregate == "updates":
            self._complete(mean, state, weight_of_network)
        weights = mean.result()
        kappa_1, kappa_2 = self._spectral_constants(state, ranks)
        diagnostics = {"kappa_uv": kappa_uv, "kappa_sigma1": kappa_1, "kappa_sigma2": kappa_2}
        if self._setup.optimizer_follows:  # what it leaves of the mean is to be decomposed
            return FedHMState(weights, state.factors, diagnostics=diagnostics)
        return self._decomposed(weights, mean, state, diagnostics)

    def settle(self, state: FedHMState, before: FedHMState) -> FedHMState:
        return self._decomposed(state.weights, None, before, state.diagnostics)

    def _decomposed(
        self, weights: Tensors, mean: WeightedMean | None, before: FedHMState, diagnostics: dict[str, float]
    ) -> FedHMState:
        factors, exact = self._factorized(weights, mean, before.factors)
        found = {**diagnostics, "exact_decompositions": exact, **self._energy_beyond(weights, factors)}
        return FedHMState(weights, factors, diagnostics=found)

    def network(self, name: str) -> nn.Module:
        return to_hybrid(self._model, self.plans[name], spectral=False)

    def weights(self, state: FedHMState, tier: str) -> Tensors:
        plan = self.plans[tier]
        tensors = {name: t for name, t in state.weights.items() if name.removesuffix(".weight") not in plan}
        for layer, rank in plan.items():
            shape = state.weights[f"{layer}.weight"].shape
            tensors[f"{layer}.u"], tensors[f"{layer}.v"] = split(*state.factors[layer].prefix(rank), shape)
        return tensors

    def _factorized(
        self, weights: Tensors, mean: WeightedMean | None = None, before: Mapping[str, Factors] | None = None
    ) -> tuple[dict[str, Factors], int]:
        """Return one decomposition per layer, at the largest rank, and how many of them were not found from `before`.

        Smaller tiers are its leading columns. `before` has those of the round before, from which most are found.
        """

        def factors_of(layer: str) -> tuple[Factors, bool]:
            name = f"{layer}.weight"
            matrix = mean.unrolled(name) if mean else None
            if matrix is None:
                matrix = unroll(weights[name], self.config.form)
            return decompose(matrix, self._largest[layer], before[layer] if before else None)

        found = side_by_side(factors_of, list(self._largest))
        contiguous = [Factors(*(tensor.contiguous() for tensor in factors)) for factors, _ in found]
        return dict(zip(self._largest, contiguous, strict=True)), sum(exact for _, exact in found)

    def _spectral_constants(self, state: FedHMState, ranks: Sequence[RankPlan]) -> tuple[float, float]:
        spectra = {layer: factors.spectrum for layer, factors in state.factors.items()}
        tails: dict[str, Tail] = {}
        for layer, spectrum in spectra.items():
            weight = state.weights[f"{layer}.weight"]
            if unknown := largest_rank(weight.shape, self.config.form) - len(spectrum):
                tails[layer] = Tail(unknown, max(0.0, squared_norm(weight) - float(spectrum.double().square().sum())))
        return spectral_constants(spectra, ranks, tails) if ranks else (0.0, 0.0)

    def _energy_beyond(self, weights: Tensors, factors: Mapping[str, Factors]) -> dict[str, float]:
        """Return, for every tier below full, the share of the model's energy that it cannot carry."""
        spectra = {layer: factors[layer].spectrum for layer in self._largest}
        energies = {layer: squared_norm(weights[f"{layer}.weight"]) for layer in self._largest}
        return {
            f"energy_beyond/{tier}": energy_beyond(energies, spectra, self.plans[tier])
            for tier in self.tiers
            if tier != FULL
        }

    def _fold(self, mean: WeightedMean, update: Update, plan: RankPlan, weight: float) -> float:
        """Add one client's model to the mean and return its κ_UV."""
        rows = trained_rows(update, self._setup.classifier)
        norm = 0.0
        for layer in plan:
            u, v = update.tensors[f"{layer}.u"], update.tensors[f"{layer}.v"]
            mean.add_product(f"{layer}.weight", *join(u, v), weight)
            norm = max(norm, largest_norm((u, v)))
        for name, tensor in update.tensors.items():
            layer, _, part = name.rpartition(".")
            if part not in ("u", "v") or layer not in plan:
                mean.add(name, tensor, weight, rows if layer == self._setup.classifier else None)
        return norm

    def _complete(self, mean: WeightedMean, state: FedHMState, weight_of_network: Mapping[str, float]) -> None:
        """Turn every recovered model Uₚ Vₚᵀ of the sum into W + Uₚ Vₚᵀ − sentₚ."""
        for network, weight in weight_of_network.items():
            for layer, rank in self.plans[network].items():
                mean.correct_product(f"{layer}.weight", *state.factors[layer].prefix(rank), -weight)
                mean.correct(f"{layer}.weight", state.weights[f"{layer}.weight"], weight)


def _weight(config: FedHMConfig, ratio: float, samples: int) -> float:
    """Return αₚ up to a factor, which the mean divides out; the exponents are at most 0, so nothing overflows."""
    if config.weighting == "softmax":  # the paper: softmax(γ / τ)
        return math.exp((ratio - 1) / config.temperature)
    if config.weighting == "softmax-inverse":  # published code: softmax(−(1 / γ) / τ)
        return math.exp((1 - 1 / ratio) / config.temperature)
    return float(samples) if config.weighting == "samples" else 1.0


ENTRY_POINT = FedHMConfig
