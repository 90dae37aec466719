"""The mean of client models of different ranks, recovered to full shape: of the models, their changes, or by bands."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Literal

from torch import Tensor

from fedhm.config.sections.method_config import only_uniform
from fedhm.lowrank.changes.bands import Level, mean_change
from fedhm.lowrank.decompositions.svd import Factors
from fedhm.lowrank.decompositions.unroll import Form, join, roll, unroll
from fedhm.lowrank.decompositions.warm import decompose
from fedhm.lowrank.diagnostics import largest_norm
from fedhm.lowrank.layers import largest_rank
from fedhm.lowrank.plan import RankPlan
from fedhm.machine.side_by_side import side_by_side
from fedhm.methods.mean import MakeMean, WeightedMean, trained_rows
from fedhm.networks.exchange import Tensors
from fedhm.networks.precision import precise
from fedhm.work.messages import Update

Aggregate = Literal["models", "updates", "bands"]


def unbounded(aggregate: Aggregate, weighting: str) -> str:
    """Return why such a mean has no bound for one client's change, and what to set; empty if it has one."""
    if aggregate == "updates":
        return only_uniform(weighting)
    models = "counts as a client's change what truncation took from its model"
    why = models if aggregate == "models" else "averages a band over the few clients whose rank reaches it"
    return f"method.aggregate = '{aggregate}' {why}: set 'updates'"


class RecoveredMean:
    """The mean over updates of hybrid networks, folded one at a time.

    models   Σ αₚ recoveredₚ / Σ αₚ
    updates  W + Σ αₚ (recoveredₚ − sentₚ) / Σ αₚ
    bands    the same, each band of a change over those whose rank reaches it: one buffer for each network
    """

    def __init__(
        self,
        weights: Tensors,
        factors: Mapping[str, Factors],
        aggregate: Aggregate,
        form: Form,
        classifier: str | None,
        make_mean: MakeMean = WeightedMean,
        band_speed: float = 1.0,
    ) -> None:
        self._weights, self._factors = weights, factors
        self._aggregate, self._form, self._classifier = aggregate, form, classifier
        self._whole = make_mean(weights)
        # a rule that is no mean is one over what was sent the same
        self._apart = aggregate == "bands" or make_mean is not WeightedMean
        self._make_mean, self._band_speed = make_mean, band_speed
        self._means: dict[str, WeightedMean] = {}  # by network; without bands they are all one
        self._plans: dict[str, RankPlan] = {}
        self._influence: dict[str, float] = defaultdict(float)
        self.ranks: list[RankPlan] = []  # of each update
        self.kappa_uv = 0.0

    @property
    def folded(self) -> Set[str]:
        """Return the tiers of which models were folded in."""
        return self._plans.keys()

    def fold(self, update: Update, tier: str, plan: RankPlan, weight: float) -> None:
        """Add the model that a client trained, of a tier's ranks, to the mean."""
        mean = self._means.setdefault(tier, self._make_mean(self._weights) if self._apart else self._whole)
        self._plans[tier] = plan
        self._influence[tier] += weight
        self.ranks.append(plan)
        rows = trained_rows(update, self._classifier)
        for layer in plan:
            u, v = update.tensors[f"{layer}.u"], update.tensors[f"{layer}.v"]
            mean.add_product(f"{layer}.weight", *join(u, v), weight)
            self.kappa_uv = max(self.kappa_uv, largest_norm((u, v)))
        for name, tensor in update.tensors.items():
            layer, _, part = name.rpartition(".")
            if part not in ("u", "v") or layer not in plan:
                mean.add(name, tensor, weight, rows if layer == self._classifier else None)

    def fold_own(self, weight: float) -> None:
        """Add the server's own model to the mean, as if a client had returned it as it was."""
        for name, tensor in self._weights.items():
            self._whole.add(name, tensor, weight)

    def result(self) -> tuple[Tensors, Tensors]:
        """Return the means, and those of factorized layers in unrolled form where that is there already; once."""
        banded = self._banded() if self._aggregate == "bands" and len(self._means) > 1 else {}
        by_changes = self._aggregate != "models" and not banded  # which has all factorized layers
        if by_changes:
            self._subtract_sent()
        for mean in self._means.values():
            if mean is not self._whole:
                self._whole.absorb(mean, but=banded.keys())
        if by_changes:
            self._add_to_old()
        merged = self._whole.result()
        unrolled = {name: t.to(merged[name].dtype) for name in merged if (t := self._whole.unrolled(name)) is not None}
        for name, (weight, matrix) in banded.items():
            merged[name], unrolled[name] = weight, matrix
        return merged, unrolled

    def _subtract_sent(self) -> None:
        """Turn every factored model Uₚ Vₚᵀ of the sums into the change Uₚ Vₚᵀ − sentₚ."""
        for network, weight in self._influence.items():
            for layer, rank in self._plans[network].items():
                sent = self._factors[layer].prefix(rank)
                self._means[network].correct_product(f"{layer}.weight", *sent, -weight)

    def _add_to_old(self) -> None:
        """Turn every such change of the sum into W + Uₚ Vₚᵀ − sentₚ."""
        for network, weight in self._influence.items():
            for layer in self._plans[network]:
                self._whole.correct(f"{layer}.weight", self._weights[f"{layer}.weight"], weight)

    def _banded(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the means over the bands of all layers that some network has factorized, and their unrolled form."""
        layers = list(dict.fromkeys(layer for plan in self._plans.values() for layer in plan))
        # here, and not side by side: a rule that is no mean settles all layers when it is asked for the first
        totals = {
            layer: {network: mean.take(f"{layer}.weight") for network, mean in self._means.items()} for layer in layers
        }

        def mean_of(layer: str) -> tuple[Tensor, Tensor]:
            old = self._weights[f"{layer}.weight"]
            factors = Factors(*(precise(tensor) for tensor in self._factors[layer]))
            # nothing else holds the totals, so that what is made next, and for the next layer, has their memory
            levels = (self._level(layer, network, total) for network, total in totals.pop(layer).items())
            mean = mean_change(list(levels), factors, self._band_speed).add_(precise(unroll(old, self._form)))
            return roll(mean, old.shape).to(old.dtype), mean.to(old.dtype)

        return {f"{layer}.weight": mean for layer, mean in zip(layers, side_by_side(mean_of, layers), strict=True)}

    def _level(self, layer: str, network: str, total: Tensor) -> Level:
        """Return what the clients of one network have in a layer, in unrolled form."""
        weight, plan = self._influence[network], self._plans[network]
        if layer in plan:
            return Level(plan[layer], total, weight, sent=plan[layer])
        old = self._weights[f"{layer}.weight"]  # dense there
        change = unroll(total.sub_(precise(old), alpha=weight), self._form)
        return Level(largest_rank(old.shape, self._form), change.contiguous(), weight)


def largest_ranks(plans: Iterable[RankPlan]) -> dict[str, int]:
    """Return, by layer, the largest rank that any plan asks for."""
    largest: dict[str, int] = {}
    for plan in plans:
        for layer, rank in plan.items():
            largest[layer] = max(rank, largest.get(layer, 0))
    return largest


def factorized(
    weights: Tensors,
    plans: Iterable[RankPlan],
    form: Form,
    unrolled: Mapping[str, Tensor] = {},
    before: Mapping[str, Factors] | None = None,
) -> tuple[dict[str, Factors], int]:
    """Return one decomposition per layer, at the largest rank, and how many of them were not found from `before`.

    Smaller tiers are its leading columns. `before` has those of the round before, from which most are found.
    """
    largest = largest_ranks(plans)

    def factors_of(layer: str) -> tuple[Factors, bool]:
        name = f"{layer}.weight"
        matrix = unrolled[name] if name in unrolled else unroll(weights[name], form)
        return decompose(matrix, largest[layer], before[layer] if before else None)

    found = side_by_side(factors_of, list(largest))
    contiguous = [Factors(*(tensor.contiguous() for tensor in factors)) for factors, _ in found]
    return dict(zip(largest, contiguous, strict=True)), sum(exact for _, exact in found)
