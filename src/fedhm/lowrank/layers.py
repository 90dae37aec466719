"""Factorized layers: each equals the dense layer whose weight is the product of its two factors."""

from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.lowrank.convolve import convolve
from fedhm.lowrank.svd import factorize
from fedhm.lowrank.unroll import Form, join, roll, split, unroll, unrolled_shape


class LowRank(nn.Module):
    """The two factors of one layer, and the dense weight that they stand for.

    W = roll(L R), with L (rows, r) held as `u` and R (r, columns) held as `v`; `unroll` tells how.
    """

    form: ClassVar[Form] = "spatial"

    def __init__(self, dense: nn.Conv2d | nn.Linear, rank: int, *, spectral: bool = True) -> None:
        super().__init__()
        weight = dense.weight.detach()
        self.dense_shape = weight.shape
        self.rank = rank
        if spectral:
            left, right = factorize(unroll(weight, self.form), rank).prefix(rank)
        else:
            rows, columns = unrolled_shape(weight.shape, self.form)
            left, right = weight.new_zeros(rows, rank), weight.new_zeros(rank, columns)
        u, v = split(left, right, weight.shape)
        self.u = nn.Parameter(u, requires_grad=dense.weight.requires_grad)
        self.v = nn.Parameter(v, requires_grad=dense.weight.requires_grad)
        self.bias = dense.bias
        self.train(dense.training)

    @property
    def weight(self) -> Tensor:
        """Return the recovered dense weight, for owners that reach for `layer.weight` instead of calling the layer."""
        left, right = join(self.u, self.v)
        return roll(left @ right, self.dense_shape)


class LowRankLinear(LowRank):
    """A factorized Linear layer: y = (x uᵀ) vᵀ + b, with u (r, m), v (n, r)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.u), self.v, self.bias)

    def extra_repr(self) -> str:
        n, m = self.dense_shape
        return f"in_features={m}, out_features={n}, rank={self.rank}, bias={self.bias is not None}"


class LowRankConvolution(LowRank):
    """A factorized convolution: what both forms take over from the dense one; a bias stays on the second factor."""

    def __init__(self, dense: nn.Conv2d, rank: int, *, spectral: bool = True) -> None:
        super().__init__(dense, rank, spectral=spectral)
        self.stride = cast(tuple[int, int], dense.stride)
        self.dilation = cast(tuple[int, int], dense.dilation)
        self.padding = dense.padding
        self.padding_mode = dense.padding_mode
        # (left, right, top, bottom), worked out by torch for "same" too
        self._pads: list[int] = list(dense._reversed_padding_repeated_twice)

    def extra_repr(self) -> str:
        n, m, k1, k2 = self.dense_shape
        return f"{m}, {n}, kernel_size=({k1}, {k2}), rank={self.rank}, stride={self.stride}, padding={self.padding}"


class LowRankConv2d(LowRankConvolution):
    """A k₁×1 convolution m → r, then a 1×k₂ convolution r → n: r (m k₁ + n k₂) parameters.

    Stride, padding and dilation are split by axis, so the pair equals the dense convolution also at stride 2.
    """

    def forward(self, x: Tensor) -> Tensor:
        vertical: str | tuple[int, int]
        horizontal: str | tuple[int, int]
        if self.padding_mode != "zeros":
            # Padding by columns commutes with a vertical convolution, so each axis can be padded just before its own.
            x = F.pad(x, [0, 0, *self._pads[2:]], mode=self.padding_mode)
            vertical = horizontal = (0, 0)
        elif isinstance(self.padding, str):
            vertical = horizontal = self.padding
        else:
            vertical, horizontal = (self.padding[0], 0), (0, self.padding[1])
        x = convolve(x, self.u, None, (self.stride[0], 1), vertical, (self.dilation[0], 1))
        if self.padding_mode != "zeros":
            x = F.pad(x, [*self._pads[:2], 0, 0], mode=self.padding_mode)
        return convolve(x, self.v, self.bias, (1, self.stride[1]), horizontal, (1, self.dilation[1]))


class PufferfishConv2d(LowRankConvolution):
    """A k₁×k₂ convolution m → r, then a 1×1 convolution r → n, as in Pufferfish: r (m k₁ k₂ + n) parameters.

    Stride, padding and dilation are all the first one's.
    """

    form = "pufferfish"

    def forward(self, x: Tensor) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._pads, mode=self.padding_mode), (0, 0)
        x = F.conv2d(x, self.u, None, self.stride, padding, self.dilation)
        return F.conv2d(x, self.v, self.bias)


# Which layers are factorized, by their exact type and the form: a row for each, to which others may be added.
LAYERS: dict[type[nn.Module], dict[Form, type[LowRank]]] = {
    nn.Conv2d: {"spatial": LowRankConv2d, "pufferfish": PufferfishConv2d},
    nn.Linear: {"spatial": LowRankLinear, "pufferfish": LowRankLinear},
}


def largest_rank(shape: torch.Size, form: Form = "spatial") -> int:
    """Return the rank at which a factorized layer can express every weight of `shape`."""
    return min(unrolled_shape(shape, form))
