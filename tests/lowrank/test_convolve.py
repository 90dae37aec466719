from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedhm.lowrank import layers as module
from fedhm.lowrank.layers import LowRankConv2d, convolve, weight_gradient


def by_product(y: Tensor) -> bool:
    return "_Convolution" in type(y.grad_fn).__name__


@pytest.fixture
def at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORTHWHILE", 0)


@settings(deadline=None, max_examples=200)
@given(st.data(), st.booleans(), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4))
def test_weight_gradient_is_that_of_torch(
    data: st.DataObject, vertical: bool, taps: int, stride: int, padding: int
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    m, n = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    kernel, strides, paddings = ((taps, 1), (stride, 1), (padding, 0))
    if not vertical:
        kernel, strides, paddings = kernel[::-1], strides[::-1], paddings[::-1]
    x = torch.randn(2, m, 6, 5, dtype=torch.float64)
    weight = torch.randn(n, m, *kernel, dtype=torch.float64, requires_grad=True)
    y = F.conv2d(x, weight, None, strides, paddings)
    g = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, weight, g)
    found = weight_gradient(x, g, weight.shape, strides, paddings)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("at_any_size")
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("bias", [False, True])
def test_factorized_layer_equals_the_dense_one_in_output_and_gradients(stride: int, mode: str, bias: bool) -> None:
    dense = nn.Conv2d(4, 6, 3, stride, 1, bias=bias, padding_mode=mode, dtype=torch.float64)
    layer = LowRankConv2d(dense, 3)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    inputs = [x, layer.u, layer.v, *([layer.bias] if bias else [])]
    y, expected = layer(x), dense._conv_forward(x, layer.weight, dense.bias)
    assert by_product(convolve(x, layer.u, None, (stride, 1), (1, 0), (1, 1)))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    g = torch.randn_like(y)
    pairs = zip(torch.autograd.grad(y, inputs, g), torch.autograd.grad(expected, inputs, g), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("at_any_size")
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_gradients_are_derivatives_and_can_be_derived_again(check: Callable[..., bool]) -> None:
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2, 3, 1, dtype=torch.float64, requires_grad=True)
    assert by_product(convolve(x, weight, None, (1, 1), (1, 0), (1, 1)))
    assert check(lambda x, w: convolve(x, w, None, (1, 1), (1, 0), (1, 1)), (x, weight))


@pytest.mark.usefixtures("at_any_size")
def test_frozen_factors_and_images_need_no_gradient() -> None:
    x, weight = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 1, 3, requires_grad=True)
    convolve(x, weight, None, (1, 1), (0, 1), (1, 1)).sum().backward()
    assert weight.grad is not None
    assert not convolve(x, weight.detach(), None, (1, 1), (0, 1), (1, 1)).requires_grad


@pytest.mark.parametrize(
    ("channels", "pixels", "batch", "expected"),
    [(256, 4, 64, True), (256, 8, 16, True), (256, 16, 64, False), (16, 8, 16, False)],
)
def test_large_layers_on_small_images_only(channels: int, pixels: int, batch: int, expected: bool) -> None:
    weight = torch.zeros(channels // 2, channels, 3, 1, requires_grad=True)
    x = torch.zeros(batch, channels, pixels, pixels)
    assert by_product(convolve(x, weight, None, (1, 1), (1, 0), (1, 1))) == expected


@pytest.mark.usefixtures("at_any_size")
def test_automatic_mixed_precision_is_left_to_torch() -> None:
    layer = LowRankConv2d(nn.Conv2d(3, 4, 3, padding=1), 2)
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(2, 3, 4, 4)).float().sum().backward()
    assert layer.u.grad is not None
