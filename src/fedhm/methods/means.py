"""Means of client models, one update at a time: the weighted mean, coordinate-wise rules, and the recovered mean.

`WeightedMean` averages tensors by name, dense or in factor form. `CoordinateMean` replaces the mean of every number by
a trimmed mean or a median. `RecoveredMean` averages models of different ranks, recovered to full shape.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedhm.config.method import MethodConfig, only_uniform
from fedhm.config.schema import ServerConfig
from fedhm.errors import FedhmError
from fedhm.lowrank.average import Aggregate, RankLevel, mean_by_bands
from fedhm.lowrank.diagnostics import largest_norm
from fedhm.lowrank.layers import dense_weight_name, largest_rank
from fedhm.lowrank.svd import Factors, Form, decompose, roll, to_matrix_factors, unroll
from fedhm.machine.device import parallel_map
from fedhm.networks.exchange import Tensors, upcast_half, upcast_half_dtype
from fedhm.widths.narrow import ChannelIndices, assignable_indices
from fedhm.work.messages import Update

# Classifier rows of labels that a client does not hold: the client is left out of their mean, it counts with its rows
# as they are, or it counts with zeros.
AbsentLabels = Literal["leave-out", "count", "zero"]
Classifiers = str | Collection[str] | None  # the layer that gives the outputs, or several


def for_ranks(absent_labels: AbsentLabels, ranks: Mapping[str, int]) -> AbsentLabels:
    """Return the setting for clients of these ranks. As in published code, the full network never counts with zeros."""
    return "count" if absent_labels == "zero" and not ranks else absent_labels


class WeightedMean:
    """Σ αₚ xₚ / Σ αₚ for every tensor by name. A tensor without contributions keeps its old value.

    Dense and factored contributions go to separate buffers. So dense clients are summed by the same operations, whether
    or not there are factored contributions too.
    """

    def __init__(self, old: Tensors) -> None:
        self._old = old
        self._sums: Tensors = {}
        self._products: Tensors = {}  # in unrolled form
        self._weights: dict[str, float | Tensor] = {}  # one number, or one for each row or element

    def add(self, name: str, tensor: Tensor, weight: float, rows: Tensor | None = None) -> None:
        """Add a dense tensor; with `rows`, a mask, only these rows of it."""
        if rows is None:
            self.add_to_sum(name, tensor, weight)
            self._count(name, weight)
            return
        tensor, share = upcast_half(tensor), rows * weight
        self._sum(name).addcmul_(tensor, _per_row(share, tensor))
        self._count(name, share)

    def add_all(
        self,
        update: Update,
        weight: float,
        classifier: Classifiers,
        absent_labels: AbsentLabels = "leave-out",
    ) -> None:
        """Add a whole update."""
        rows, classifiers = trained_rows(update, classifier), classifier_names(classifier)
        for name, tensor in update.tensors.items():
            if name.rpartition(".")[0] in classifiers:
                self.add_classifier(name, tensor, weight, rows, absent_labels)
            else:
                self.add(name, tensor, weight)

    def add_classifier(
        self, name: str, tensor: Tensor, weight: float, rows: Tensor | None, absent_labels: AbsentLabels
    ) -> None:
        """Add a tensor of the classifier, of which a client trained the `rows` of its labels; None: all rows."""
        if rows is None or absent_labels == "count":
            self.add(name, tensor, weight)
        elif absent_labels == "zero":
            self.add(name, tensor * _per_row(rows, tensor), weight)
        else:
            self.add(name, tensor, weight, rows)

    def add_part(
        self, name: str, tensor: Tensor, weight: float, indices: ChannelIndices, rows: Tensor | None = None
    ) -> None:
        """Add a tensor that has only the numbers at `indices`. A number's mean is over the clients that have it."""
        tensor = upcast_half(tensor)
        share = torch.full_like(tensor, weight, dtype=torch.float64)
        if rows is not None:
            share *= _per_row(rows, share)
        where = assignable_indices(indices, self._old[name].shape)
        self._sum(name)[where] += tensor * share.to(tensor.dtype)
        shares = torch.zeros_like(self._old[name], dtype=torch.float64)
        shares[where] = share
        self._count(name, shares)

    def add_product(self, name: str, left: Tensor, right: Tensor, weight: float) -> None:
        """Add the weight that unrolls to `left @ right`, without forming it."""
        self.add_product_to_sum(name, left, right, weight)
        self._count(name, weight)

    def add_product_to_sum(self, name: str, left: Tensor, right: Tensor, weight: float) -> None:
        """Add `weight · left @ right` to the sum, without counting it as a contribution."""
        left, right = upcast_half(left), upcast_half(right)
        if name in self._products:
            self._products[name].addmm_(left, right, alpha=weight)
        else:
            product = left @ right
            self._products[name] = product if weight == 1 else product.mul_(weight)

    def add_to_sum(self, name: str, tensor: Tensor, weight: float) -> None:
        """Add `weight · tensor` to the sum, without counting it as a contribution."""
        if name in self._sums:
            self._sums[name].add_(upcast_half(tensor), alpha=weight)
        else:
            self._sums[name] = upcast_half(tensor) * weight

    def add_mean(self, other: "WeightedMean", exclude: Set[str] = frozenset()) -> None:
        """Add all contributions of another mean, except those to the names in `exclude`."""
        for name in [each for each in other._weights if each not in exclude]:
            self._count(name, other._weights[name])
            if name in other._sums:
                self.add_to_sum(name, other._sums[name], 1.0)
            if (product := other._products.get(name)) is not None:
                self._products[name] = self._products[name].add_(product) if name in self._products else product.clone()

    def pop_sum(self, name: str) -> Tensor:
        """Remove and return the sum of a tensor, in unrolled form if its contributions were factored."""
        return self._products.pop(name) if name in self._products else self._sums.pop(name)

    def result(self) -> Tensors:
        """Return the means. Call it once: the sums become the means in place."""
        merged: Tensors = {}
        for name, old in self._old.items():
            if name not in self._weights:
                merged[name] = old
            elif name in self._products:
                merged[name] = roll(self._unrolled_mean(name), old.shape).to(old.dtype)
            else:
                merged[name] = self._dense_mean(name).to(old.dtype)
        return merged

    def unrolled(self, name: str) -> Tensor | None:
        """Return, after `result`, a mean in unrolled form; None if it had no factored contributions."""
        return self._products.get(name)

    def _dense_mean(self, name: str) -> Tensor:
        weight, old = self._weights[name], self._old[name]
        if isinstance(weight, float):
            return self._sums[name].div_(weight) if weight > 0 else old
        total = self._sums[name]
        shaped = _per_row(weight, total)
        return torch.where(shaped.real > 0, total / shaped, old)

    def _unrolled_mean(self, name: str) -> Tensor:
        total = self._products[name]
        if name in self._sums:
            form: Form = "pufferfish" if total.shape[1] == len(self._old[name]) else "spatial"
            total += unroll(self._sums[name], form)
        return total.div_(self._weights[name])

    def _sum(self, name: str) -> Tensor:
        if name not in self._sums:
            old = self._old[name]
            self._sums[name] = torch.zeros_like(old, dtype=upcast_half_dtype(old.dtype))
        return self._sums[name]

    def _count(self, name: str, share: float | Tensor) -> None:
        self._weights[name] = self._weights.get(name, 0.0) + share


def _per_row(weight: Tensor, tensor: Tensor) -> Tensor:
    """Return one weight per row, shaped and typed to multiply `tensor`."""
    shaped = weight.reshape(-1, *[1] * (tensor.ndim - 1)) if weight.ndim == 1 else weight
    return shaped.to(tensor.dtype)


def client_weight(update: Update, weighting: str) -> float:
    """Return the weight α of a client in a mean: its number of samples, or 1, times its own weight."""
    return (float(update.samples) if weighting == "samples" else 1.0) * update.weight


def classifier_names(classifier: Classifiers) -> Collection[str]:
    """Return the names of all layers that give outputs."""
    return (() if classifier is None else (classifier,)) if isinstance(classifier, str | None) else classifier


def trained_rows(update: Update, classifier: Classifiers) -> Tensor | None:
    """Return a mask of the classifier's rows that a client trained: those of the labels it holds; None: all rows.

    Of several classifiers, all have a row for every label. A client's network may have only some of them.
    """
    names = [f"{name}.weight" if name else "weight" for name in classifier_names(classifier)]  # "": the whole model
    weight = next((update.tensors[name] for name in names if name in update.tensors), None)
    if update.labels is None or weight is None or len(update.labels) == len(weight):
        return None
    rows = torch.zeros(len(weight), dtype=torch.float64)
    rows[list(update.labels)] = 1.0
    return rows


MakeMean = Callable[[Tensors], WeightedMean]  # from the old weights


def average(
    old: Tensors,
    updates: Iterable[Update],
    weighting: str,
    classifier: Classifiers,
    make_mean: MakeMean = WeightedMean,
) -> Tensors:
    """Return the mean of networks that all have the same tensors; `weighting` is "uniform" or "samples"."""
    mean = make_mean(old)
    for update in updates:
        mean.add_all(update, client_weight(update, weighting), classifier)
    return mean.result()


Rule = Literal["trimmed-mean", "median"]
FEWEST = 3  # with fewer contributions it is not clear which number is wrong, and the mean is used


@dataclass
class _Contributions:
    """All contributions to one tensor."""

    tensors: list[Tensor] = field(default_factory=list)
    rows: list[Tensor | None] = field(default_factory=list)  # masks of the rows that count
    weights: list[float] = field(default_factory=list)
    unrolled: bool = False  # they are products of factors: in one tier, all contributions to a weight or none


class CoordinateMean(WeightedMean):
    """A coordinate-wise rule in place of the mean: the trimmed mean or the median of every number (Yin et al. 2018).

    The rule needs all contributions together, so those of a tier are held until the round's end, recovered to full
    shape. Clients count alike within a tier. A tensor's sum is the result of the rule times the sum of all weights.
    """

    def __init__(self, old: Tensors, rule: Rule, trim: float) -> None:
        super().__init__(old)
        self._rule, self._trim = rule, trim
        self._contributions: dict[str, _Contributions] = {}

    def add(self, name: str, tensor: Tensor, weight: float, rows: Tensor | None = None) -> None:
        self._hold(name, upcast_half(tensor), weight, rows)

    def add_product(self, name: str, left: Tensor, right: Tensor, weight: float) -> None:
        self._hold(name, upcast_half(left) @ upcast_half(right), weight)
        self._contributions[name].unrolled = True

    def _hold(self, name: str, tensor: Tensor, weight: float, rows: Tensor | None = None) -> None:
        given = self._contributions.setdefault(name, _Contributions())
        given.tensors.append(tensor)
        given.weights.append(weight)
        given.rows.append(rows)

    def add_mean(self, other: WeightedMean, exclude: Set[str] = frozenset()) -> None:
        if isinstance(other, CoordinateMean):
            other.apply_rule()
        super().add_mean(other, exclude)

    def pop_sum(self, name: str) -> Tensor:
        self.apply_rule()
        return super().pop_sum(name)

    def result(self) -> Tensors:
        self.apply_rule()
        return super().result()

    def apply_rule(self) -> None:
        """Apply the rule to the contributions so far, and turn the results into sums."""
        for name, given in self._contributions.items():
            weight = sum(given.weights)
            if given.unrolled:
                total = weight * robust_mean(torch.stack(given.tensors), self._rule, self._trim)
                self._products[name] = self._products[name].add_(total) if name in self._products else total
                self._count(name, weight)
            elif all(rows is None for rows in given.rows):
                super().add(name, robust_mean(torch.stack(given.tensors), self._rule, self._trim), weight)
            else:
                self._apply_rule_to_rows(name, given)
        self._contributions = {}

    def _apply_rule_to_rows(self, name: str, given: _Contributions) -> None:
        """Apply the rule to each row, over the clients that trained it."""
        every = torch.ones(len(given.tensors[0]), dtype=torch.float64)
        counts = torch.stack([every if rows is None else rows for rows in given.rows]) > 0  # (clients, rows)
        stacked, weights = torch.stack(given.tensors), torch.tensor(given.weights, dtype=torch.float64)
        result = torch.zeros_like(given.tensors[0])
        for row in range(len(result)):
            if counts[:, row].any():
                result[row] = robust_mean(stacked[counts[:, row], row], self._rule, self._trim)
        super().add(name, result, 1.0, weights @ counts.double())


def robust_mean(stacked: Tensor, rule: Rule, trim: float) -> Tensor:
    """Return the rule over the first axis, of clients. A trimmed mean leaves out a share at each end, at least one."""
    count = len(stacked)
    if count < FEWEST:
        return stacked.mean(0)
    ends = max(1, int(trim * count)) if rule == "trimmed-mean" else (count - 1) // 2
    if stacked.is_complex():
        parts = torch.view_as_real(stacked).sort(0).values[ends : count - ends].mean(0)
        return torch.view_as_complex(parts)
    return stacked.sort(0).values[ends : count - ends].mean(0)


def mean_of(server: ServerConfig, method: MethodConfig) -> MakeMean:
    """Return the constructor of a method's means: the weighted mean, or a coordinate-wise rule."""
    rule = server.robust
    if rule != "trimmed-mean" and rule != "median":
        return WeightedMean
    if not method.by_coordinate:
        raise FedhmError(
            f"server.robust = '{rule}' is for methods that average whole models, and {method.name} does not: "
            "set it to 'clip', 'centered-clip' or 'krum'"
        )
    return partial(CoordinateMean, rule=rule, trim=server.trim)


def unbounded(aggregate: Aggregate, weighting: str) -> str:
    """Return why one client's influence on a recovered mean is not bounded, and what to set; empty if it is."""
    if aggregate == "updates":
        return only_uniform(weighting)
    models = "counts as a client's change what truncation took from its model"
    why = models if aggregate == "models" else "averages a band over the few clients whose rank reaches it"
    return f"method.aggregate = '{aggregate}' {why}: set 'updates'"


class RecoveredMean:
    """The mean over updates of hybrid networks of different ranks, recovered to full shape, one update at a time.

    models   Σ αₚ recoveredₚ / Σ αₚ
    updates  W + Σ αₚ (recoveredₚ − sentₚ) / Σ αₚ
    bands    the same, each band of a change over the clients whose rank reaches it: one buffer for each tier
    """

    def __init__(
        self,
        weights: Tensors,
        factors: Mapping[str, Factors],
        aggregate: Aggregate,
        form: Form,
        classifier: Classifiers,
        make_mean: MakeMean = WeightedMean,
        band_speed: float = 1.0,
        absent_labels: AbsentLabels = "leave-out",
    ) -> None:
        self._weights, self._factors, self._absent_labels = weights, factors, absent_labels
        self._aggregate, self._form, self._classifiers = aggregate, form, classifier_names(classifier)
        self._whole = make_mean(weights)
        # a coordinate-wise rule applies to clients that were sent the same network
        self._by_tier = aggregate == "bands" or make_mean is not WeightedMean
        self._make_mean, self._band_speed = make_mean, band_speed
        self._means: dict[str, WeightedMean] = {}  # by tier; without bands all are the same mean
        self._plans: dict[str, Mapping[str, int]] = {}
        self._tier_weights: dict[str, float] = defaultdict(float)
        self.ranks: list[Mapping[str, int]] = []  # of each update
        self.kappa_uv = 0.0

    @property
    def tiers(self) -> Set[str]:
        """Return the tiers whose models were added."""
        return self._plans.keys()

    def add(self, update: Update, tier: str, plan: Mapping[str, int], weight: float) -> None:
        """Add the model that a client trained, with a tier's ranks, to the mean."""
        mean = self._means.setdefault(tier, self._make_mean(self._weights) if self._by_tier else self._whole)
        self._plans[tier] = plan
        self._tier_weights[tier] += weight
        self.ranks.append(plan)
        rows = trained_rows(update, self._classifiers)
        for layer in plan:
            u, v = update.tensors[f"{layer}.u"], update.tensors[f"{layer}.v"]
            mean.add_product(dense_weight_name(layer), *to_matrix_factors(u, v), weight)
            self.kappa_uv = max(self.kappa_uv, largest_norm((u, v)))
        for name, tensor in update.tensors.items():
            layer, _, part = name.rpartition(".")
            if layer in self._classifiers and layer not in plan:
                mean.add_classifier(name, tensor, weight, rows, for_ranks(self._absent_labels, plan))
            elif part not in ("u", "v") or layer not in plan:
                mean.add(name, tensor, weight)

    def add_server_model(self, weight: float) -> None:
        """Add the server's own model to the mean, as if a client had returned it unchanged."""
        for name, tensor in self._weights.items():
            self._whole.add(name, tensor, weight)

    def result(self) -> tuple[Tensors, Tensors]:
        """Return the means, and those of factorized layers in unrolled form if they exist already. Call it once."""
        banded = self._banded() if self._aggregate == "bands" and len(self._means) > 1 else {}
        by_changes = self._aggregate != "models" and not banded  # the bands cover all factorized layers
        if by_changes:
            self._subtract_sent()
        for mean in self._means.values():
            if mean is not self._whole:
                self._whole.add_mean(mean, exclude=banded.keys())
        if by_changes:
            self._add_to_old()
        merged = self._whole.result()
        unrolled = {name: t.to(merged[name].dtype) for name in merged if (t := self._whole.unrolled(name)) is not None}
        for name, (weight, matrix) in banded.items():
            merged[name], unrolled[name] = weight, matrix
        return merged, unrolled

    def _subtract_sent(self) -> None:
        """Turn every factored model Uₚ Vₚᵀ of the sums into the change Uₚ Vₚᵀ − sentₚ."""
        for tier, weight in self._tier_weights.items():
            for layer, rank in self._plans[tier].items():
                sent = self._factors[layer].prefix(rank)
                self._means[tier].add_product_to_sum(dense_weight_name(layer), *sent, -weight)

    def _add_to_old(self) -> None:
        """Turn every change Uₚ Vₚᵀ − sentₚ of the sum into W + Uₚ Vₚᵀ − sentₚ."""
        for tier, weight in self._tier_weights.items():
            for layer in self._plans[tier]:
                self._whole.add_to_sum(dense_weight_name(layer), self._weights[dense_weight_name(layer)], weight)

    def _banded(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the means by bands of all layers that some tier has factorized, and their unrolled form."""
        layers = list(dict.fromkeys(layer for plan in self._plans.values() for layer in plan))
        # Not in parallel: a coordinate-wise rule is applied to all layers when the first layer is asked for.
        totals = {
            layer: {tier: mean.pop_sum(dense_weight_name(layer)) for tier, mean in self._means.items()}
            for layer in layers
        }

        def mean_of(layer: str) -> tuple[Tensor, Tensor]:
            old = self._weights[dense_weight_name(layer)]
            factors = Factors(*(upcast_half(tensor) for tensor in self._factors[layer]))
            # Nothing else holds the totals, so the next matrices, and the next layer, can reuse their memory.
            levels = (self._level(layer, tier, total) for tier, total in totals.pop(layer).items())
            mean = mean_by_bands(list(levels), factors, self._band_speed).add_(upcast_half(unroll(old, self._form)))
            return roll(mean, old.shape).to(old.dtype), mean.to(old.dtype)

        return {
            dense_weight_name(layer): mean for layer, mean in zip(layers, parallel_map(mean_of, layers), strict=True)
        }

    def _level(self, layer: str, tier: str, total: Tensor) -> RankLevel:
        """Return the sum over one tier's clients in a layer, in unrolled form."""
        weight, plan = self._tier_weights[tier], self._plans[tier]
        if layer in plan:
            return RankLevel(plan[layer], total, weight, sent=plan[layer])
        old = self._weights[dense_weight_name(layer)]  # the layer is dense in this tier
        change = unroll(total.sub_(upcast_half(old), alpha=weight), self._form)
        return RankLevel(largest_rank(old.shape, self._form), change.contiguous(), weight)


def largest_ranks(plans: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return, by layer, the largest rank that any plan asks for."""
    largest: dict[str, int] = {}
    for plan in plans:
        for layer, rank in plan.items():
            largest[layer] = max(rank, largest.get(layer, 0))
    return largest


def factorized(
    weights: Tensors,
    plans: Iterable[Mapping[str, int]],
    form: Form,
    unrolled: Mapping[str, Tensor] = {},
    before: Mapping[str, Factors] | None = None,
) -> tuple[dict[str, Factors], int]:
    """Return one decomposition per layer, at the largest rank, and how many of them were computed from scratch.

    Smaller tiers are its leading columns. Most decompositions start from those of the round before, `before`.
    """
    largest = largest_ranks(plans)

    def factors_of(layer: str) -> tuple[Factors, bool]:
        name = dense_weight_name(layer)
        matrix = unrolled[name] if name in unrolled else unroll(weights[name], form)
        return decompose(matrix, largest[layer], before[layer] if before else None)

    found = parallel_map(factors_of, list(largest))
    contiguous = [Factors(*(tensor.contiguous() for tensor in factors)) for factors, _ in found]
    return dict(zip(largest, contiguous, strict=True)), sum(exact for _, exact in found)
