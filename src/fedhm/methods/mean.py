"""The weighted mean of client models, folded one at a time, dense or in factor form."""

from collections.abc import Callable, Iterable, Set

import torch
from torch import Tensor

from fedhm.lowrank.decompositions.unroll import Form, roll, unroll
from fedhm.networks.exchange import Tensors
from fedhm.networks.precision import precise, precise_type
from fedhm.widths.narrow import Where, spots
from fedhm.work.messages import Update


class WeightedMean:
    """Σ αₚ xₚ / Σ αₚ for every tensor by name; whatever nobody contributed to keeps its old value.

    Dense and factored contributions go to separate buffers, so that dense clients are summed by the very same
    operations whether or not there are factored ones beside them.
    """

    def __init__(self, old: Tensors) -> None:
        self._old = old
        self._sums: Tensors = {}
        self._products: Tensors = {}  # in unrolled form
        self._weights: dict[str, float | Tensor] = {}  # a number, or one for each row or element

    def add(self, name: str, tensor: Tensor, weight: float, rows: Tensor | None = None) -> None:
        """Fold in a dense tensor; with `rows`, a mask, only those of its rows."""
        if rows is None:
            self.correct(name, tensor, weight)
            self._count(name, weight)
            return
        tensor, share = precise(tensor), rows * weight
        self._sum(name).addcmul_(tensor, _per_row(share, tensor))
        self._count(name, share)

    def add_all(self, update: Update, weight: float, classifier: str | None) -> None:
        """Fold in a whole update."""
        rows = trained_rows(update, classifier)
        for name, tensor in update.tensors.items():
            self.add(name, tensor, weight, rows if name.rpartition(".")[0] == classifier else None)

    def add_part(self, name: str, tensor: Tensor, weight: float, indices: Where, rows: Tensor | None = None) -> None:
        """Fold in a tensor that holds only the numbers at `indices`; the mean is over those who hold a number."""
        tensor = precise(tensor)
        share = torch.full_like(tensor, weight, dtype=torch.float64)
        if rows is not None:
            share *= _per_row(rows, share)
        where = spots(indices, self._old[name].shape)
        self._sum(name)[where] += tensor * share.to(tensor.dtype)
        held = torch.zeros_like(self._old[name], dtype=torch.float64)
        held[where] = share
        self._count(name, held)

    def add_product(self, name: str, left: Tensor, right: Tensor, weight: float) -> None:
        """Fold in the weight that unrolls to `left @ right`, without forming it."""
        self.correct_product(name, left, right, weight)
        self._count(name, weight)

    def correct_product(self, name: str, left: Tensor, right: Tensor, weight: float) -> None:
        """Add `weight · left @ right` to the sum, without counting it as a contribution."""
        left, right = precise(left), precise(right)
        if name in self._products:
            self._products[name].addmm_(left, right, alpha=weight)
        else:
            product = left @ right
            self._products[name] = product if weight == 1 else product.mul_(weight)

    def correct(self, name: str, tensor: Tensor, weight: float) -> None:
        """Add `weight · tensor` to the sum, without counting it as a contribution."""
        if name in self._sums:
            self._sums[name].add_(precise(tensor), alpha=weight)
        else:
            self._sums[name] = precise(tensor) * weight

    def absorb(self, other: "WeightedMean", but: Set[str] = frozenset()) -> None:
        """Fold in all that another mean has been given, but for these names."""
        for name in [each for each in other._weights if each not in but]:
            self._count(name, other._weights[name])
            if name in other._sums:
                self.correct(name, other._sums[name], 1.0)
            if (product := other._products.get(name)) is not None:
                self._products[name] = self._products[name].add_(product) if name in self._products else product.clone()

    def take(self, name: str) -> Tensor:
        """Give away the sum behind a mean, which is then gone: in unrolled form if its contributions were factored."""
        return self._products.pop(name) if name in self._products else self._sums.pop(name)

    def result(self) -> Tensors:
        """Return the means. To be called once: the sums become the means in place."""
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
        """Return, after `result`, a mean in unrolled form, where there is one already, since it had factored parts."""
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
            self._sums[name] = torch.zeros_like(old, dtype=precise_type(old.dtype))
        return self._sums[name]

    def _count(self, name: str, share: float | Tensor) -> None:
        self._weights[name] = self._weights.get(name, 0.0) + share


def _per_row(weight: Tensor, tensor: Tensor) -> Tensor:
    """Return one weight per row, shaped and typed to multiply `tensor`."""
    shaped = weight.reshape(-1, *[1] * (tensor.ndim - 1)) if weight.ndim == 1 else weight
    return shaped.to(tensor.dtype)


def influence(update: Update, weighting: str) -> float:
    return float(update.samples) if weighting == "samples" else 1.0


def trained_rows(update: Update, classifier: str | None) -> Tensor | None:
    """Return a mask of the classifier's rows that a client trained, those of the labels it holds; None for all rows."""
    weight = update.tensors.get(f"{classifier}.weight" if classifier else "weight")  # a model may be one layer
    if classifier is None or update.labels is None or weight is None or len(update.labels) == len(weight):
        return None
    rows = torch.zeros(len(weight), dtype=torch.float64)
    rows[list(update.labels)] = 1.0
    return rows


MakeMean = Callable[[Tensors], WeightedMean]  # from the old weights


def average(
    old: Tensors,
    updates: Iterable[Update],
    weighting: str,
    classifier: str | None,
    make_mean: MakeMean = WeightedMean,
) -> Tensors:
    """Return the mean of networks that are all alike, tensor by tensor: each counts once, or by its "samples"."""
    mean = make_mean(old)
    for update in updates:
        mean.add_all(update, influence(update, weighting), classifier)
    return mean.result()
