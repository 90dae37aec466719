"""Factorized layers: each equals the dense layer whose weight is the product of its two factors."""

from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.lowrank.convolve import convolve
from fedhm.lowrank.decompositions.svd import factorize
from fedhm.lowrank.decompositions.unroll import Form, join, roll, split, unroll, unrolled_shape


class LowRank(nn.Module):
    """The two factors of one layer, and the dense weight that they stand for.

    W = roll(L R), with L (rows, r) held as `u` and R (r, columns) held as `v`; `unroll` tells how.
    """

    form: ClassVar[Form] = "spatial"

    def __init__(self, dense: nn.Module, rank: int, *, spectral: bool = True) -> None:
        super().__init__()
        trained = cast(Tensor, dense.weight)
        weight = trained.detach()
        self.dense_shape = weight.shape
        self.rank = rank
        if spectral:
            left, right = factorize(unroll(weight, self.form), rank).prefix(rank)
        else:
            rows, columns = unrolled_shape(weight.shape, self.form)
            left, right = weight.new_zeros(rows, rank), weight.new_zeros(rank, columns)
        u, v = split(left, right, weight.shape)
        self.u = nn.Parameter(u, requires_grad=trained.requires_grad)
        self.v = nn.Parameter(v, requires_grad=trained.requires_grad)
        self.bias = cast(nn.Parameter | None, dense.bias)
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


class LowRankTransposed(LowRank):
    """A factorized Linear layer that holds its weight as (m, n), as `transformers`' Conv1D does: y = (x v) u + b.

    Everybody else takes that weight for one of a Linear from n to m. So u is (r, n) and v (m, r): what is v u to them
    is also what x is multiplied by.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.v.T), self.u.T, self.bias)

    def extra_repr(self) -> str:
        m, n = self.dense_shape
        return f"in_features={m}, out_features={n}, rank={self.rank}, bias={self.bias is not None}"


class LowRankConvolution(LowRank):
    """A factorized convolution: what all forms take over from the dense one; a bias stays on the second factor."""

    def __init__(self, dense: nn.Conv1d | nn.Conv2d, rank: int, *, spectral: bool = True) -> None:
        super().__init__(dense, rank, spectral=spectral)
        self.stride: tuple[int, ...] = dense.stride
        self.dilation: tuple[int, ...] = dense.dilation
        self.padding: str | tuple[int, ...] = dense.padding
        self.padding_mode = dense.padding_mode
        # (left, right, top, bottom), worked out by torch for "same" too
        self._pads: list[int] = list(dense._reversed_padding_repeated_twice)

    def extra_repr(self) -> str:
        n, m, *kernel = self.dense_shape
        size = f"kernel_size={tuple(kernel)}"
        return f"{m}, {n}, {size}, rank={self.rank}, stride={self.stride}, padding={self.padding}"


class LowRankConv1d(LowRankConvolution):
    """A convolution of k taps m → r, then one of a single tap r → n: r (m k + n) parameters.

    It is what a Conv2d with a k×1 kernel becomes, in both forms. Stride, padding and dilation are all the first one's.
    """

    def forward(self, x: Tensor) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._pads, mode=self.padding_mode), (0,)
        x = F.conv1d(x, self.u, None, self.stride, padding, self.dilation)
        return F.conv1d(x, self.v, self.bias)


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
    nn.Conv1d: {"spatial": LowRankConv1d, "pufferfish": LowRankConv1d},
    nn.Conv2d: {"spatial": LowRankConv2d, "pufferfish": PufferfishConv2d},
    nn.Linear: {"spatial": LowRankLinear, "pufferfish": LowRankLinear},
}
# The same for layers of packages that are not imported here, by the full name of their type.
FOREIGN: dict[str, dict[Form, type[LowRank]]] = {
    "transformers.pytorch_utils.Conv1D": {"spatial": LowRankTransposed, "pufferfish": LowRankTransposed},
}


def forms_of(layer: nn.Module) -> dict[Form, type[LowRank]] | None:
    """Return what a layer is factorized as, in each form; None if its type is not known."""
    kind = type(layer)
    return LAYERS.get(kind) or FOREIGN.get(f"{kind.__module__}.{kind.__qualname__}")


def whole_rank(shape: torch.Size) -> int:
    """Return the rank that stands for a ratio of 1: as many as output channels, or as a matrix has directions."""
    return shape[0] if len(shape) > 2 else min(shape)


def largest_rank(shape: torch.Size, form: Form = "spatial") -> int:
    """Return the rank at which a factorized layer can express every weight of `shape`."""
    return min(unrolled_shape(shape, form))
