"""The factor space of the convergence analysis: participants of different ranks, padded with zeros to one shape.

A point h holds all parameters of a network, with U and V of every factorized layer. Participant p has rank r(p) in a
layer. With r the largest of these ranks,

    Ũ = [U, 0]    Ṽ = [V, 0]    both with r columns

have the same product, and SGD on them makes the same steps: ∂U = ∇F V and ∂V = ∇Fᵀ U are 0 in columns in which both
factors are 0. So points of all participants can be subtracted and averaged.

A participant may train a layer dense that others factorize. In the analysis it has factors of full rank. Here

    at the start of a round   it enters by U √Σ, V √Σ of full rank, of which the others' factors are the first columns
    at its end                by U' √Σ', V' √Σ' of its weight W', turned by the orthogonal matrix that brings them
                              nearest to those of the start: the factors of a weight are not unique, and this choice
                              measures no rotation that training did not make

Names, shapes and layouts are those of factorized layers: u (r, …) and v (n, r, …), see `lowrank/svd.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhm.lowrank.layers import dense_weight_name, largest_rank
from fedhm.lowrank.svd import Form, to_layer_factors, to_matrix_factors, unroll, unrolled_shape

Point = dict[str, Tensor]  # by parameter, in float64
Pair = tuple[Tensor, Tensor]  # u and v of a layer


def pad_factors(u: Tensor, v: Tensor, rank: int) -> Pair:
    """Return the factors of a layer with zeros beyond their rank: u (r, …) and v (n, r, …) for r = `rank`."""
    missing = rank - len(u)
    return (
        torch.cat([u, u.new_zeros(missing, *u.shape[1:])]),
        torch.cat([v, v.new_zeros(len(v), missing, *v.shape[2:])], dim=1),
    )


def complete_factors(weight: Tensor, u: Tensor, v: Tensor) -> Pair:
    """Return factors of full rank of a dense weight, whose first directions are `u` and `v`.

    These are leading singular directions of the weight, so the others are those of what they leave of it.
    """
    form = _form(u, weight)
    left, right = to_matrix_factors(u, v)
    more = largest_rank(weight.shape, form) - left.shape[1]
    U, S, Vt = torch.linalg.svd(unroll(weight, form) - left @ right, full_matrices=False)
    root = S[:more].sqrt()
    left, right = torch.cat([left, U[:, :more] * root], 1), torch.cat([right, root[:, None] * Vt[:more]])
    return to_layer_factors(left, right, weight.shape)


def align_factors(weight: Tensor, u: Tensor, v: Tensor) -> Pair:
    """Return the balanced factors of full rank of a dense weight that are nearest to `u` and `v`.

    All balanced factors are A R, Rᵀ B for one pair A, B and an orthogonal R. The nearest is a Procrustes problem: R is
    the orthogonal part of Aᵀ L + B Rightᵀ, with L and Right the factors to be near to.
    """
    left, right = to_matrix_factors(u, v)
    U, S, Vt = torch.linalg.svd(unroll(weight, _form(u, weight)), full_matrices=False)
    A, B = U * S.sqrt(), S.sqrt()[:, None] * Vt
    P, _, Qt = torch.linalg.svd(A.T @ left + B @ right.T)
    return to_layer_factors(A @ (P @ Qt), (P @ Qt).T @ B, weight.shape)


def _form(u: Tensor, weight: Tensor) -> Form:
    """Return how a weight is unrolled, by the shape of its first factor."""
    return "pufferfish" if u[0].numel() == unrolled_shape(weight.shape, "pufferfish")[0] else "spatial"


@dataclass(frozen=True)
class FactorSpace:
    """The space of the participants of a round.

    ranks    of every layer that a participant factorizes, the largest rank
    factors  by layer, u and v of the participant with the largest rank that is not full, padded to `ranks`; if some
             participant trains the layer dense, factors of full rank that begin with these
    """

    ranks: Mapping[str, int]
    factors: Mapping[str, Pair]

    @classmethod
    def of(cls, networks: Iterable[tuple[Mapping[str, int], Mapping[str, Tensor]]]) -> "FactorSpace":
        """Return the space of the networks that were sent in a round, each with its ranks and its tensors."""
        sent = list(networks)
        factors: dict[str, Pair] = {}
        for layer in dict.fromkeys(layer for ranks, _ in sent for layer in ranks):
            _, holder = max((ranks[layer], number) for number, (ranks, _) in enumerate(sent) if layer in ranks)
            u, v = (sent[holder][1][f"{layer}.{part}"].double() for part in "uv")
            dense = next((tensors for ranks, tensors in sent if layer not in ranks), None)
            weight = dense[dense_weight_name(layer)].double() if dense else None
            factors[layer] = (u, v) if weight is None else complete_factors(weight, u, v)
        return cls({layer: len(u) for layer, (u, _) in factors.items()}, factors)

    def start(self, tensors: Mapping[str, Tensor]) -> Point:
        """Return the point of a network as it was sent, from its trained tensors."""
        return self._point(tensors, lambda layer, _: self.factors[layer])

    def end(self, tensors: Mapping[str, Tensor]) -> Point:
        """Return the point of a network as it came back, from its trained tensors."""
        return self._point(tensors, lambda layer, weight: align_factors(weight, *self.factors[layer]))

    def _point(self, tensors: Mapping[str, Tensor], factors_of_dense: Callable[[str, Tensor], Pair]) -> Point:
        point: Point = {}
        for name, tensor in tensors.items():
            layer, part = self._layer_and_part(name)
            if not self._is_factorized(name):
                point[name] = _real(tensor)
            elif part != "v":  # it comes with u
                pair = (
                    factors_of_dense(layer, tensor.double())
                    if part == "weight"
                    else pad_factors(tensor.double(), tensors[f"{layer}.v"].double(), self.ranks[layer])
                )
                point[f"{layer}.u"], point[f"{layer}.v"] = pair
        return point

    def tensors(self, point: Point, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the network at a point; beside factors, these are those of a network that was sent."""
        shared = {name: tensor for name, tensor in sent.items() if not self._is_factorized(name)}
        dtypes = {self._layer_and_part(name)[0]: tensor.dtype for name, tensor in sent.items() if name not in shared}
        return shared | {n: t.to(dtypes[n.rpartition(".")[0]]) for n, t in point.items() if self._is_factorized(n)}

    def _is_factorized(self, name: str) -> bool:
        """Tell whether a tensor is a factor, or the dense weight, of a layer that some participant factorizes."""
        layer, part = self._layer_and_part(name)
        return layer in self.ranks and part in ("u", "v", "weight")

    def _layer_and_part(self, name: str) -> tuple[str, str]:
        """Split a tensor's name; the dense weight of a recurrent layer is a layer of rank plans by itself."""
        layer, _, part = name.rpartition(".")
        return (name, "weight") if name in self.ranks else (layer, part)


def squared_distance(first: Point, second: Point) -> float:
    """Return ‖first − second‖²."""
    return sum(float((tensor - second[name]).square().sum()) for name, tensor in first.items())


def mean_point(points: Iterable[tuple[int, Point]]) -> Point:
    """Return the mean of points, each counted so often as the number beside it says."""
    total: Point = {}
    count = 0
    for times, point in points:
        total = {name: t * times + total[name] if name in total else t * times for name, t in point.items()}
        count += times
    return {name: tensor / count for name, tensor in total.items()}


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
