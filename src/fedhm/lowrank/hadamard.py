"""FedPara's layers: weights composed of two low-rank halves by the elementwise product, and their ranks.

    Linear       W = (X₁ Y₁ᵀ) ⊙ (X₂ Y₂ᵀ)
    convolution  W = (T₁ ×₁ X₁ ×₂ Y₁) ⊙ (T₂ ×₁ X₂ ×₂ Y₂)

With X (n, R), Y (m, R) and T (R, R, k₁, k₂) a half has rank R at most, but W has up to R²: full rank from few
parameters.
"""

import math
from collections.abc import Callable, Collection
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.lowrank.layers import LowRankTransposed, factorized_types
from fedhm.lowrank.plan import RankPlan, find_weights, plan_ranks


class Half(nn.Module):
    """A half of a weight: X Yᵀ, or T ×₁ X ×₂ Y for a convolution: x (n, R), y (m, R), t (R, R, k₁, k₂)."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator | None) -> None:
        super().__init__()
        n, m, *kernel = weight.shape
        spread = factor_deviation(weight.detach(), rank)

        def factor(*shape: int) -> nn.Parameter:
            values = torch.zeros(shape) if generator is None else spread * torch.randn(shape, generator=generator)
            return nn.Parameter(values.to(weight), requires_grad=weight.requires_grad)

        self.x, self.y = factor(n, rank), factor(m, rank)
        self.t = factor(rank, rank, *kernel) if kernel else None

    def forward(self) -> Tensor:
        if self.t is None:
            return self.x @ self.y.T
        return torch.einsum("ab...,na,mb->nm...", self.t, self.x, self.y)


class Hadamard(nn.Module):
    """The two halves of one layer, and the dense weight, which is composed once for each batch."""

    def __init__(self, dense: nn.Module, rank: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.rank = rank
        weight = cast(Tensor, dense.weight)
        self.first, self.second = Half(weight, rank, generator), Half(weight, rank, generator)
        self.bias = cast(nn.Parameter | None, dense.bias)
        self.train(dense.training)

    @property
    def weight(self) -> Tensor:
        composed: Tensor = self.first() * self.second()
        return composed

    def extra_repr(self) -> str:
        return f"rank={self.rank}, bias={self.bias is not None}"


class HadamardLinear(Hadamard):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class HadamardTransposed(Hadamard):
    """A linear layer whose weight is held as (m, n)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.T, self.bias)


class HadamardConvolution(Hadamard):
    convolve: ClassVar[Callable[..., Tensor]]

    def __init__(self, dense: nn.Conv1d | nn.Conv2d, rank: int, generator: torch.Generator | None = None) -> None:
        super().__init__(dense, rank, generator)
        self.stride: tuple[int, ...] = dense.stride
        self.dilation: tuple[int, ...] = dense.dilation
        self.padding: str | tuple[int, ...] = dense.padding
        self.padding_mode = dense.padding_mode
        # (left, right, top, bottom), which torch computes for "same" too
        self._pads: list[int] = list(dense._reversed_padding_repeated_twice)

    def forward(self, x: Tensor) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._pads, mode=self.padding_mode), (0,) * len(self.stride)
        return self.convolve(x, self.weight, self.bias, self.stride, padding, self.dilation)


class HadamardConv1d(HadamardConvolution):
    convolve = staticmethod(F.conv1d)


class HadamardConv2d(HadamardConvolution):
    convolve = staticmethod(F.conv2d)


def hadamard_of(layer: nn.Module) -> type[Hadamard]:
    """Return the Hadamard type of a layer."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return HadamardConv1d if isinstance(layer, nn.Conv1d) else HadamardConv2d
    transposed = (factorized_types(layer) or {}).get("spatial") is LowRankTransposed
    return HadamardTransposed if transposed else HadamardLinear


def factor_deviation(weight: Tensor, rank: int) -> float:
    """Return the σ at which factors drawn from N(0, σ²) compose a W with the mean square of `weight`.

    A half sums R products of two factors, for a convolution R² products of three, and the halves are independent:
    E[W²] = (R σ⁴)² or (R² σ⁶)².
    """
    factors = 2 if weight.ndim == 2 else 3
    half = weight.double().square().mean().sqrt().item()
    return float((half / rank ** (factors - 1)) ** (1 / (2 * factors)))


def plan_hadamard(
    model: nn.Module, ratio: float, keep: int = 1, *, classifier: str | Collection[str] | None = "auto"
) -> RankPlan:
    """Plan the rank of every layer's halves: γ = `ratio` goes from the smallest useful rank to the largest.

    `keep` and `classifier` are those of `plan_ranks`, which also decides which other layers stay dense.
    """
    # at this ratio every possible layer is factorized; FedPara composes convolutions above 1×1 and Linear layers
    layers = plan_ranks(model, 1e-9, keep, classifier=classifier, pointwise=False)
    decisions = dict(layers.decisions)
    weights = {weight.name: weight for weight in find_weights(model)}
    for name in layers:
        layer, weight = weights[name].layer, weights[name].tensor
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag | nn.RNNBase):
            decisions[name] = f"a {type(layer).__name__}, which FedPara does not compose"
        elif not weight.requires_grad:
            decisions[name] = "it is frozen, and factors start at random"
        elif not weight.any():
            decisions[name] = "it starts at 0, where factors have no gradient"
        else:
            decisions[name] = hadamard_rank(weight.shape, ratio)
    return RankPlan(decisions)


def hadamard_rank(shape: torch.Size, ratio: float) -> int | str:
    """Return R = (1 − γ) R_min + γ R_max, rounded, or the reason to stay dense.

    With R_min = ⌈√min(n, m)⌉ the weight can have full rank. R_max is the largest rank that does not add parameters.
    """
    smallest = math.isqrt(min(shape[:2]) - 1) + 1
    largest = 0
    while hadamard_parameters(shape, largest + 1) <= shape.numel():
        largest += 1
    rank = max(smallest, round((1 - ratio) * smallest + ratio * largest))
    if (size := hadamard_parameters(shape, rank)) >= shape.numel():
        return f"rank {rank} would hold {size:,} parameters instead of {shape.numel():,}"
    return rank


def hadamard_parameters(shape: torch.Size, rank: int) -> int:
    """Count the parameters of both halves: 2 R (n + m), for a convolution 2 R² k₁ k₂ more."""
    n, m, *kernel = shape
    return 2 * rank * (n + m) + (2 * rank**2 * math.prod(kernel) if kernel else 0)
