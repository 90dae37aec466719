"""Convolutions along one axis, k×1 or 1×k, of small images: their weight gradient is one matrix product.

oneDNN, by which torch convolves on CPUs, sums a weight gradient row by row of the image, and rows of a few pixels leave
it at half its speed or less. The gradient of tap j, over all positions p,

    dW[o, c, j] = Σₚ g[p, o] x[p + j − padding, c]

is a product of two matrices once the shifted copies of one of them lie side by side. It is the one with fewer channels:
between two factors these are as few as the rank.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

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
