"""Convolutions along one axis, k×1 or 1×k, of small images: their weight gradient is one matrix product.

oneDNN, by which torch convolves on CPUs, sums a weight gradient row by row of the image, and rows of a few pixels leave
it at half its speed or less. The gradient of tap j, over all positions p,

    dW[o, c, j] = Σₚ g[p, o] x[p + j − padding, c]

is a product of two matrices once the shifted copies of one of them lie side by side. It is the one with fewer channels:
between two factors these are as few as the rank.
"""

from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.lowrank.svd import Form, factorize, roll, to_layer_factors, to_matrix_factors, unroll, unrolled_shape

ROW = 8  # pixels: in longer rows oneDNN is as fast
WORTHWHILE = 2**25  # multiply-accumulates: fewer take no longer than calling the operations for them

Pair = tuple[int, int]


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair | str, dilation: Pair
) -> Tensor:
    """Compute `F.conv2d` with a kernel k×1 or 1×k."""
    if isinstance(padding, str) or dilation != (1, 1) or not _pays(x, weight, stride):
        return F.conv2d(x, weight, bias, stride, padding, dilation)
    y = cast(Tensor, _Convolution.apply(x, weight, stride, padding))  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias[:, None, None]


def _pays(x: Tensor, weight: Tensor, stride: Pair) -> bool:
    if x.ndim != 4 or x.device.type not in ("cpu", "meta") or not (weight.requires_grad and torch.is_grad_enabled()):
        return False
    batch, _, height, width = x.shape
    rows, row = batch * height // stride[0], width // stride[1]
    return row <= ROW and rows * row * weight.numel() >= WORTHWHILE and not torch.is_autocast_enabled("cpu")


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        context.save_for_backward(*inputs[:2])
        context.stride, context.padding = inputs[2:]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = context.saved_tensors
        (g,) = gradients
        of_x = of_weight = None
        if context.needs_input_grad[0]:
            # not `nn.grad.conv2d_input`, which makes up an x and loses its memory format
            shape = (None, context.stride, context.padding, (1, 1), False, (0, 0), 1)
            of_x = torch.ops.aten.convolution_backward(g, x, weight, *shape, (True, False, False))[0]
        if context.needs_input_grad[1]:
            of_weight = weight_gradient(x, g, weight.shape, context.stride, context.padding)
        return of_x, of_weight, None, None


def weight_gradient(x: Tensor, g: Tensor, shape: torch.Size, stride: Pair, padding: Pair) -> Tensor:
    """Return the gradient of a weight of `shape`, (n, m, k, 1) or (n, m, 1, k), for input x and output gradient g."""
    n, m, *kernel = shape
    vertical, horizontal = zip(kernel, stride, padding, strict=True)
    axis, (taps, step, pad) = (1, vertical) if horizontal == (1, 1, 0) else (2, horizontal)
    x, g = x.permute(0, 2, 3, 1), g.permute(0, 2, 3, 1)  # (batch, height, width, channels)
    if step == 1 and n < m:
        # Seen from x, it is g that is shifted, the other way.
        product = _shifted(g, axis, taps, taps - 1 - pad, 1).T @ x.reshape(-1, m)  # (k n, m)
        return product.view(taps, n, m).flip(0).permute(1, 2, 0).reshape(shape)
    product = _shifted(x, axis, taps, pad, step).T @ g.reshape(-1, n)  # (k m, n)
    return product.view(taps, m, n).permute(2, 1, 0).reshape(shape)


def _shifted(images: Tensor, axis: int, taps: int, pad: int, step: int) -> Tensor:
    """Lay shifted copies side by side: (batch, height, width, channels) → (positions, taps · channels)."""
    pads = [0, 0, pad, pad] if axis == 2 else [0, 0, 0, 0, pad, pad]
    windows = F.pad(images, pads).unfold(axis, taps, step)  # (batch, height, width, channels, taps)
    return windows.transpose(3, 4).reshape(-1, taps * images.shape[3])


# Factorized layers: each equals the dense layer whose weight is the product of its two factors.


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
        u, v = to_layer_factors(left, right, weight.shape)
        self.u = nn.Parameter(u, requires_grad=trained.requires_grad)
        self.v = nn.Parameter(v, requires_grad=trained.requires_grad)
        self.bias = cast(nn.Parameter | None, dense.bias)
        self.train(dense.training)

    @property
    def weight(self) -> Tensor:
        """Return the recovered dense weight, for owners that reach for `layer.weight` instead of calling the layer."""
        left, right = to_matrix_factors(self.u, self.v)
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


def factorized_types(layer: nn.Module) -> dict[Form, type[LowRank]] | None:
    """Return what a layer is factorized as, in each form; None if its type is not known."""
    kind = type(layer)
    return LAYERS.get(kind) or FOREIGN.get(f"{kind.__module__}.{kind.__qualname__}")


def rank_at_ratio_one(shape: torch.Size) -> int:
    """Return the rank that stands for a ratio of 1: as many as output channels, or as a matrix has directions."""
    return shape[0] if len(shape) > 2 else min(shape)


def largest_rank(shape: torch.Size, form: Form = "spatial") -> int:
    """Return the rank at which a factorized layer can express every weight of `shape`."""
    return min(unrolled_shape(shape, form))
