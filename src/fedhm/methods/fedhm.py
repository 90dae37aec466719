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

from torch import nn

from fedhm.config.method import FedHMConfig, tier_name
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
from fedhm.methods.method import Setup, State
from fedhm.methods.tier_plan import tier_plan
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Participant, Task, Update

FULL = tier_name(1)


class FedHM:
    def __init__(self, model: nn.Module, config: FedHMConfig, setup: Setup = Setup()) -> None:
        self.config = config
        # by network; the full one is there for the warm-up, whatever the tiers
        self.ratios = {FULL: 1.0} | {tier_name(ratio): ratio for ratio in config.tiers}
        self.plans = {
            name: tier_plan(model, ratio, config.keep, setup.classifier, config.form)
            for name, ratio in self.ratios.items()
        }
        if min(_weight(config, ratio, 1) for ratio in config.tiers) < 1e-30:  # beyond what float32 can sum
            raise FedhmError(f"method.temperature = {config.temperature:g} leaves the smallest tier without weight")
        self._model = model
        self._classifier = setup.classifier
        self._largest: dict[str, int] = {}  # layer → the largest rank that any tier asks for
        for plan in self.plans.values():
            for layer, rank in plan.items():
                self._largest[layer] = max(rank, self._largest.get(layer, 0))

    @property
    def tiers(self) -> Sequence[str]:
        return tuple(dict.fromkeys(self.levels))

    @property
    def levels(self) -> Sequence[str]:
        return tuple(tier_name(ratio) for ratio in sorted(self.config.tiers, reverse=True))

    def start(self, weights: Tensors) -> State:
        memory, _ = self._factorized(weights)
        return State(weights, memory)

    def tasks(self, state: State, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        warm = round_number <= self.config.warmup
        networks = [FULL if warm else p.tier for p in participants]
        sent = {name: self.weights(state, name) for name in set(networks)}
        for p, name in zip(participants, networks, strict=True):
            yield Task("train", round_number, p.client, p.tier, name, sent[name])

    def merge(self, state: State, updates: Iterable[Update]) -> State:
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
        memory, exact = self._factorized(weights, mean, state.memory)
        diagnostics["exact_decompositions"] = exact
        return State(weights, memory, diagnostics | self._energy_beyond(weights, memory))

    def network(self, name: str) -> nn.Module:
        return to_hybrid(self._model, self.plans[name], spectral=False)

    def weights(self, state: State, tier: str) -> Tensors:
        plan = self.plans[tier]
        tensors = {name: t for name, t in state.weights.items() if name.removesuffix(".weight") not in plan}
        for layer, rank in plan.items():
            left, right = state.memory[f"{layer}/left"], state.memory[f"{layer}/right"]
            shape = state.weights[f"{layer}.weight"].shape
            tensors[f"{layer}.u"], tensors[f"{layer}.v"] = split(left[:, :rank], right[:rank], shape)
        return tensors

    def _factorized(
        self, weights: Tensors, mean: WeightedMean | None = None, before: Tensors | None = None
    ) -> tuple[Tensors, int]:
        """One decomposition per layer, at the largest rank: the smaller tiers are its leading columns.

        With those of the round before in `before`, most are found from there; and how many were not.
        """

        def factors_of(layer: str) -> tuple[Factors, bool]:
            name = f"{layer}.weight"
            matrix = mean.unrolled(name) if mean else None
            if matrix is None:
                matrix = unroll(weights[name], self.config.form)
            return decompose(matrix, self._largest[layer], _factors(before, layer) if before else None)

        memory: Tensors = {}
        count = 0
        for layer, (factors, exact) in zip(self._largest, side_by_side(factors_of, list(self._largest)), strict=True):
            memory |= {f"{layer}/{part}": tensor.contiguous() for part, tensor in factors._asdict().items()}
            count += exact
        return memory, count

    def _spectral_constants(self, state: State, ranks: Sequence[RankPlan]) -> tuple[float, float]:
        spectra = {layer: state.memory[f"{layer}/spectrum"] for layer in self._largest}
        tails: dict[str, Tail] = {}
        for layer, spectrum in spectra.items():
            weight = state.weights[f"{layer}.weight"]
            if unknown := largest_rank(weight.shape, self.config.form) - len(spectrum):
                tails[layer] = Tail(unknown, max(0.0, squared_norm(weight) - float(spectrum.double().square().sum())))
        return spectral_constants(spectra, ranks, tails) if ranks else (0.0, 0.0)

    def _energy_beyond(self, weights: Tensors, memory: Tensors) -> dict[str, float]:
        """For every tier below full, the share of the model that it cannot carry."""
        spectra = {layer: memory[f"{layer}/spectrum"] for layer in self._largest}
        energies = {layer: squared_norm(weights[f"{layer}.weight"]) for layer in self._largest}
        return {
            f"energy_beyond/{tier}": energy_beyond(energies, spectra, self.plans[tier])
            for tier in self.tiers
            if tier != FULL
        }

    def _fold(self, mean: WeightedMean, update: Update, plan: RankPlan, weight: float) -> float:
        """Adds one client's model to the mean; its κ_UV."""
        rows = trained_rows(update, self._classifier)
        norm = 0.0
        for layer in plan:
            u, v = update.tensors[f"{layer}.u"], update.tensors[f"{layer}.v"]
            mean.add_product(f"{layer}.weight", *join(u, v), weight)
            norm = max(norm, largest_norm((u, v)))
        for name, tensor in update.tensors.items():
            layer, _, part = name.rpartition(".")
            if part not in ("u", "v") or layer not in plan:
                mean.add(name, tensor, weight, rows if layer == self._classifier else None)
        return norm

    def _complete(self, mean: WeightedMean, state: State, weight_of_network: Mapping[str, float]) -> None:
        """Turns every recovered model Uₚ Vₚᵀ of the sum into W + Uₚ Vₚᵀ − sentₚ."""
        for network, weight in weight_of_network.items():
            for layer, rank in self.plans[network].items():
                left, right = state.memory[f"{layer}/left"], state.memory[f"{layer}/right"]
                mean.correct_product(f"{layer}.weight", left[:, :rank], right[:rank], -weight)
                mean.correct(f"{layer}.weight", state.weights[f"{layer}.weight"], weight)


def _factors(memory: Tensors, layer: str) -> Factors:
    return Factors(*(memory[f"{layer}/{part}"] for part in Factors._fields))


def _weight(config: FedHMConfig, ratio: float, samples: int) -> float:
    """αₚ up to a common factor, which the mean divides out; the exponents are at most 0, so nothing overflows."""
    if config.weighting == "softmax":  # the paper: softmax(γ / τ)
        return math.exp((ratio - 1) / config.temperature)
    if config.weighting == "softmax-inverse":  # published code: softmax(−(1 / γ) / τ)
        return math.exp((1 - 1 / ratio) / config.temperature)
    return float(samples) if config.weighting == "samples" else 1.0
