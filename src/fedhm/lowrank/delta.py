"""Changes of networks of which some layers are factorized: how long they are once recovered, and shorter ones.

A client is sent factors U₀, V₀ and returns U₀ + A, V₀ + B. On the straight way between them, t from 0 to 1, the
recovered weight has changed by

    C(t) = (U₀ + t A)(V₀ + t B) − U₀ V₀ = t (A V₀ + U₀ B) + t² A B

whose squared norm is a polynomial t² (a + 2 b t + c t²). Its coefficients are inner products of products of factors,
⟨L R, L' R'⟩ = ⟨Lᵀ L', R R'ᵀ⟩: matrices of r × r, and nothing dense. A dense tensor adds to a only. So the change as a
whole is cut to any length by one number t, and what is left of it is again a network of the same ranks.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhm.lowrank.svd import to_matrix_factors
from fedhm.networks.exchange import Tensors, is_averageable

HALVINGS = 60  # of the way, to find a point on it: more than a float64 has digits


@dataclass(frozen=True)
class FactorizedDelta:
    """What a client made of the tensors that it was sent, of which some are pairs of factors."""

    sent: Mapping[str, Tensor]
    returned: Mapping[str, Tensor]
    linear: float  # a of the squared norm
    mixed: float  # b
    square: float  # c

    @property
    def norm(self) -> float:
        return self._norm_at(1.0)

    def at_most(self, length: float) -> Tensors:
        """Return the tensors at a point of the way up to which the change is no longer than `length`.

        Those that were returned, to the last bit, if all of it is not.
        """
        return dict(self.at_length(min(length, self.norm)).returned)

    def at_length(self, length: float) -> "FactorizedDelta":
        """Return the change that goes the same way until it is `length` long, beyond what was returned if need be."""
        along = self.share(length)
        if along == 1.0:
            return self
        tensors = {name: _between(self.sent[name], tensor, along) for name, tensor in self.returned.items()}
        if not along:
            return FactorizedDelta(self.sent, tensors, 0.0, 0.0, 0.0)
        squared, cubed = along * along, along**3
        return FactorizedDelta(
            self.sent, tensors, squared * self.linear, cubed * self.mixed, squared * squared * self.square
        )

    def share(self, length: float) -> float:
        """Return how much of the way is to be gone until the change is as long as `length`; 1 is all of it."""
        if self.norm == length or not self.norm:
            return 1.0
        low, high = 0.0, 1.0
        while self._norm_at(high) < length:
            low, high = high, 2 * high
        for _ in range(HALVINGS):  # N(low) ≤ length ≤ N(high)
            middle = (low + high) / 2
            low, high = (middle, high) if self._norm_at(middle) <= length else (low, middle)
        return low

    def _norm_at(self, t: float) -> float:
        squared = t * t * (self.linear + t * (2 * self.mixed + t * self.square))
        return math.sqrt(max(squared, 0.0))  # rounding may leave less than 0 of it; NaN, of an overflow, stays NaN


def factorized_delta(
    returned: Tensors, sent: Tensors, factorized: Collection[str], left_out: Collection[str] = ()
) -> FactorizedDelta:
    """Return the change of all tensors but those `left_out`, which count as unchanged; `factorized` are layers."""
    linear = mixed = square = 0.0
    # in one order, whatever the collection's: that of a set differs from process to process, and sums with it
    pairs = {layer: (f"{layer}.u", f"{layer}.v") for layer in sorted(factorized)}
    apart = {name for pair in pairs.values() for name in pair} | {*left_out}
    for name, tensor in returned.items():
        if name not in apart and is_averageable(tensor):
            linear += _distance(tensor, sent[name]) ** 2
    for pair in pairs.values():
        left, right = _matrices(sent, *pair)
        a, b = (after - before for after, before in zip(_matrices(returned, *pair), (left, right), strict=True))
        first, second, both = (a, right), (left, b), (a, b)
        linear += inner_product(first, first) + 2 * inner_product(first, second) + inner_product(second, second)
        mixed += inner_product(first, both) + inner_product(second, both)
        square += inner_product(both, both)
    return FactorizedDelta(sent, returned, linear, mixed, square)


def clip_delta(returned: Tensors, sent: Tensors, factorized: Collection[str], length: float) -> Tensors:
    """Return what is left of `returned` if its change may be no longer than `length`, as it is after rounding.

    Nothing but what was sent, if numbers so large came back that there is no way towards them.
    """
    whole = factorized_delta(returned, sent, factorized)
    for share in (1.0, 1 - 1e-6, 1 - 1e-3, 1 / 2):  # of which the later ones are for numbers of 16 bits
        cut = whole.at_most(share * length)
        if factorized_delta(cut, sent, factorized).norm <= length:
            return cut
    return {name: sent[name] for name in returned}


def inner_product(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """Return the inner product of two products of factors, (M, r)(r, N) and (M, s)(s, N), by way of r × s matrices."""
    return ((one[0].T @ other[0]) * (one[1] @ other[1].T)).sum().item()


def _matrices(tensors: Tensors, u: str, v: str) -> tuple[Tensor, Tensor]:
    """Return a layer's factors in double precision: sums of inner products lose digits."""
    left, right = to_matrix_factors(tensors[u], tensors[v])
    return left.double(), right.double()


def _distance(tensor: Tensor, sent: Tensor) -> float:
    if tensor.is_complex():
        tensor, sent = torch.view_as_real(tensor), torch.view_as_real(sent)
    return torch.dist(tensor.double(), sent.double()).item()  # a bound on it must hold to more digits than float32 has


def _between(sent: Tensor, returned: Tensor, along: float) -> Tensor:
    return torch.lerp(sent, returned, along) if is_averageable(returned) else returned
