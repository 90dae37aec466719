"""The difference between the tensors that a client was sent and those it returned, if some layers are factorized.

A client is sent factors U₀, V₀ and returns U₀ + A, V₀ + B. On the straight line between them, t from 0 to 1, the
recovered weight has changed by

    C(t) = (U₀ + t A)(V₀ + t B) − U₀ V₀ = t (A V₀ + U₀ B) + t² A B

Its squared norm is a polynomial t² (a + 2 b t + c t²). The coefficients are inner products of products of factors,
⟨L R, L' R'⟩ = ⟨Lᵀ L', R R'ᵀ⟩: they take matrices of r × r, and nothing dense. A dense tensor adds to a only. So one
number t scales the whole delta to any norm, and the result is again a network of the same ranks.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhm.lowrank.svd import to_matrix_factors
from fedhm.networks.exchange import Tensors, is_averageable

HALVINGS = 60  # of the interval of t: more than a float64 has digits


@dataclass(frozen=True)
class FactorizedDelta:
    """The change from the tensors that a client was sent to those it returned; some are pairs of factors."""

    sent: Mapping[str, Tensor]
    returned: Mapping[str, Tensor]
    linear: float  # a of the squared norm in the module's docstring
    mixed: float  # b
    square: float  # c

    @property
    def norm(self) -> float:
        """Return the norm of the change of all recovered weights and dense tensors together."""
        return self._norm_at(1.0)

    def clipped(self, norm: float) -> Tensors:
        """Return the tensors after a change of at most this norm: the returned tensors themselves if it is smaller."""
        return dict(self.scaled_to(min(norm, self.norm)).returned)

    def scaled_to(self, norm: float) -> "FactorizedDelta":
        """Return the change in the same direction with this norm, which may be larger than its own norm."""
        along = self.fraction_at(norm)
        if along == 1.0:
            return self
        tensors = {name: _between(self.sent[name], tensor, along) for name, tensor in self.returned.items()}
        if not along:
            return FactorizedDelta(self.sent, tensors, 0.0, 0.0, 0.0)
        squared, cubed = along * along, along**3
        return FactorizedDelta(
            self.sent, tensors, squared * self.linear, cubed * self.mixed, squared * squared * self.square
        )

    def fraction_at(self, norm: float) -> float:
        """Return the t at which the change has this norm; 1 is the returned tensors."""
        if self.norm == norm or not self.norm:
            return 1.0
        low, high = 0.0, 1.0
        while self._norm_at(high) < norm:
            low, high = high, 2 * high
        for _ in range(HALVINGS):  # norm at low ≤ norm ≤ norm at high
            middle = (low + high) / 2
            low, high = (middle, high) if self._norm_at(middle) <= norm else (low, middle)
        return low

    def _norm_at(self, t: float) -> float:
        squared = t * t * (self.linear + t * (2 * self.mixed + t * self.square))
        return math.sqrt(max(squared, 0.0))  # rounding may make it negative; NaN, after an overflow, stays NaN


def factorized_delta(
    returned: Tensors, sent: Tensors, factorized: Collection[str], left_out: Collection[str] = ()
) -> FactorizedDelta:
    """Return the change from `sent` to `returned`.

    factorized  names of the layers whose tensors `.u` and `.v` are factors
    left_out    tensors that count as unchanged
    """
    linear = mixed = square = 0.0
    # Sorted: the order of a set differs from process to process, and rounding of the sums with it.
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
    """Return `returned` after a change of at most the norm `length`, which also holds after rounding.

    If the returned numbers are so large that this fails, the tensors that were sent are returned.
    """
    whole = factorized_delta(returned, sent, factorized)
    for share in (1.0, 1 - 1e-6, 1 - 1e-3, 1 / 2):  # the later ones are for numbers of 16 bits
        cut = whole.clipped(share * length)
        if factorized_delta(cut, sent, factorized).norm <= length:
            return cut
    return {name: sent[name] for name in returned}


def inner_product(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """Return the inner product of two products of factors, (M, r)(r, N) and (M, s)(s, N), through r × s matrices."""
    return ((one[0].T @ other[0]) * (one[1] @ other[1].T)).sum().item()


def _matrices(tensors: Tensors, u: str, v: str) -> tuple[Tensor, Tensor]:
    """Return a layer's factors in double precision, since sums of inner products lose digits."""
    left, right = to_matrix_factors(tensors[u], tensors[v])
    return left.double(), right.double()


def _distance(tensor: Tensor, sent: Tensor) -> float:
    if tensor.is_complex():
        tensor, sent = torch.view_as_real(tensor), torch.view_as_real(sent)
    return torch.dist(tensor.double(), sent.double()).item()  # bounds on it must hold to more digits than float32's


def _between(sent: Tensor, returned: Tensor, along: float) -> Tensor:
    return torch.lerp(sent, returned, along) if is_averageable(returned) else returned
