from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedhm.lowrank.layers import (
    LowRank,
    LowRankConv2d,
    LowRankConvolution,
    LowRankLinear,
    PufferfishConv2d,
    largest_rank,
)
from fedhm.lowrank.svd import Form, unroll

TIGHT = {"rtol": 0.0, "atol": 1e-12}
FORMS = [LowRankConv2d, PufferfishConv2d]
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def convolutions(draw: Callable) -> nn.Conv2d:
    """A random convolution of every kind that keeps 8×7 inputs legal: the dilated kernel spans at most 7."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    stride, padding_mode = draw(pairs), draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    padding: str | int | tuple[int, int]
    padding = draw(st.sampled_from(["same", "valid"]) | st.integers(0, 2) | st.tuples(*[st.integers(0, 2)] * 2))
    kernels = pairs
    if padding == "same":
        stride = (1, 1)
        # even kernels are padded on one side more: torch warns that it copies, and its own test below covers them
        kernels = st.sampled_from([(1, 1), (1, 3), (3, 1), (3, 3)])
    return nn.Conv2d(
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(kernels),
        stride=stride,
        padding=padding,
        dilation=draw(pairs),
        bias=draw(st.booleans()),
        padding_mode=padding_mode,
        dtype=torch.float64,
    )


def with_weight(dense: nn.Conv2d, layer: LowRank, x: Tensor) -> Tensor:
    """The dense convolution, computed by torch, with the weight that the factors stand for."""
    return dense._conv_forward(x, layer.weight, dense.bias)


@pytest.mark.slow
@settings(deadline=None, max_examples=250)
@given(convolutions(), st.sampled_from(FORMS), st.data())
def test_convolution_pair_equals_dense_convolution_with_recovered_kernel(
    dense: nn.Conv2d, kind: type[LowRankConvolution], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(1, largest_rank(dense.weight.shape, kind.form)))
    layer = kind(dense, rank)
    x = torch.randn(2, dense.in_channels, 8, 7, dtype=torch.float64)
    torch.testing.assert_close(layer(x), with_weight(dense, layer, x), **TIGHT)


@settings(deadline=None, max_examples=80)
@given(convolutions(), st.sampled_from(FORMS))
def test_convolution_at_full_rank_equals_the_original(dense: nn.Conv2d, kind: type[LowRankConvolution]) -> None:
    layer = kind(dense, largest_rank(dense.weight.shape, kind.form))
    x = torch.randn(1, dense.in_channels, 8, 7, dtype=torch.float64)
    torch.testing.assert_close(layer.weight, dense.weight, **TIGHT)
    torch.testing.assert_close(layer(x), dense(x), **TIGHT)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("kernel", [(2, 2), (4, 3), (3, 2), (2, 5)])
@pytest.mark.parametrize("dilation", [1, (1, 2)])
@pytest.mark.parametrize("kind", FORMS)
def test_same_padding_of_even_kernels(
    mode: str, kernel: tuple[int, int], dilation: int | tuple[int, int], kind: type[LowRankConvolution]
) -> None:
    dense = nn.Conv2d(2, 3, kernel, padding="same", padding_mode=mode, dilation=dilation, dtype=torch.float64)
    layer = kind(dense, 2)
    x = torch.randn(2, 2, 9, 8, dtype=torch.float64)
    y = layer(x)
    assert y.shape[2:] == x.shape[2:]
    torch.testing.assert_close(y, with_weight(dense, layer, x), **TIGHT)


@pytest.mark.parametrize("kind", FORMS)
def test_convolution_accepts_one_sample_without_batch_axis(kind: type[LowRankConvolution]) -> None:
    for mode in ("zeros", "reflect", "circular"):
        dense = nn.Conv2d(2, 3, 3, 2, 1, padding_mode=mode, dtype=torch.float64)
        layer = kind(dense, 2)
        x = torch.randn(2, 6, 5, dtype=torch.float64)
        torch.testing.assert_close(layer(x), with_weight(dense, layer, x), **TIGHT)


@pytest.mark.parametrize("kind", FORMS)
def test_convolution_in_channels_last(kind: type[LowRankConvolution]) -> None:
    dense = nn.Conv2d(3, 4, 3, 2, 1, dtype=torch.float64).to(memory_format=torch.channels_last)
    layer = kind(dense, 3)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(x), with_weight(dense, layer, x), **TIGHT)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.booleans(),
    st.lists(st.integers(0, 3), max_size=3),
    st.data(),
)
def test_linear_pair_equals_dense_layer(m: int, n: int, bias: bool, lead: list[int], data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    dense = nn.Linear(m, n, bias=bias, dtype=torch.float64)
    layer = LowRankLinear(dense, data.draw(st.integers(1, min(m, n))))
    x = torch.randn(*lead, m, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (*lead, n)
    torch.testing.assert_close(y, F.linear(x, layer.weight, dense.bias), **TIGHT)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8), st.integers(1, 8))
def test_linear_at_full_rank_equals_the_original(m: int, n: int) -> None:
    dense = nn.Linear(m, n, dtype=torch.float64)
    layer = LowRankLinear(dense, min(m, n))
    torch.testing.assert_close(layer.weight, dense.weight, **TIGHT)


@pytest.mark.parametrize("kind", [*FORMS, LowRankLinear])
def test_weight_is_the_best_approximation_of_its_rank(kind: type[LowRank]) -> None:
    dense: nn.Conv2d | nn.Linear
    dense = nn.Linear(9, 7).double() if kind is LowRankLinear else nn.Conv2d(4, 5, (3, 2)).double()
    layer = kind(dense, 3)
    assert torch.linalg.matrix_rank(unroll(layer.weight.detach(), kind.form)) == 3
    error = (layer.weight - dense.weight).norm().item()
    spectrum = torch.linalg.svdvals(unroll(dense.weight.detach(), kind.form))
    assert error == pytest.approx(float(spectrum[3:].norm()), rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(convolutions(), st.sampled_from(FORMS), st.data())
def test_gradients_through_forward_and_through_weight_agree(
    dense: nn.Conv2d, kind: type[LowRankConvolution], data: st.DataObject
) -> None:
    layer = kind(dense, data.draw(st.integers(1, largest_rank(dense.weight.shape, kind.form))))
    x = torch.randn(2, dense.in_channels, 8, 7, dtype=torch.float64, requires_grad=True)
    inputs = [x, layer.u, layer.v]
    y = layer(x)
    direction = torch.randn_like(y)
    forward = torch.autograd.grad(y, inputs, direction)
    through_weight = torch.autograd.grad(with_weight(dense, layer, x), inputs, direction)
    for one, other in zip(forward, through_weight, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_gradients_of_linear_through_forward_and_through_weight_agree() -> None:
    dense = nn.Linear(6, 5, dtype=torch.float64)
    layer = LowRankLinear(dense, 3)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    direction = torch.randn(2, 3, 5, dtype=torch.float64)
    inputs = [layer.u, layer.v, layer.bias]
    forward = torch.autograd.grad(layer(x), inputs, direction)
    through_weight = torch.autograd.grad(F.linear(x, layer.weight, layer.bias), inputs, direction)
    for one, other in zip(forward, through_weight, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


@pytest.mark.parametrize(
    ("shape", "form", "largest"),
    [
        ((4, 6), "spatial", 4),
        ((6, 4), "spatial", 4),
        ((8, 4, 3, 3), "spatial", 12),
        ((4, 8, 3, 1), "spatial", 4),
        ((4, 2, 5, 3), "spatial", 10),
        ((4, 6), "pufferfish", 4),
        ((8, 4, 3, 3), "pufferfish", 8),
        ((40, 4, 3, 3), "pufferfish", 36),
    ],
)
def test_largest_rank(shape: tuple[int, ...], form: Form, largest: int) -> None:
    assert largest_rank(torch.Size(shape), form) == largest


@pytest.mark.parametrize(
    ("dense", "kind"),
    [(nn.Conv2d(3, 4, 3), LowRankConv2d), (nn.Conv2d(3, 4, 3), PufferfishConv2d), (nn.Linear(3, 4), LowRankLinear)],
)
def test_without_spectral_start_the_factors_are_zero(dense: nn.Module, kind: type[LowRank]) -> None:
    layer = kind(dense, 2, spectral=False)  # type: ignore[arg-type]
    started = kind(dense, 2)  # type: ignore[arg-type]
    assert layer.u.eq(0).all()
    assert layer.v.eq(0).all()
    assert [p.shape for p in layer.parameters()] == [p.shape for p in started.parameters()]
    assert layer.bias is dense.bias


def test_parameters_count_as_in_the_paper() -> None:
    layer = LowRankConv2d(nn.Conv2d(8, 16, 3, bias=False), 5)
    assert sum(p.numel() for p in layer.parameters()) == 5 * 3 * (8 + 16)
    assert set(layer.state_dict()) == {"u", "v"}


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 6), pairs, st.data())
def test_parameters_count_as_in_pufferfish(m: int, n: int, kernel: tuple[int, int], data: st.DataObject) -> None:
    dense = nn.Conv2d(m, n, kernel, bias=data.draw(st.booleans()))
    rank = data.draw(st.integers(1, largest_rank(dense.weight.shape, "pufferfish")))
    layer = PufferfishConv2d(dense, rank)
    assert layer.u.numel() + layer.v.numel() == rank * (m * kernel[0] * kernel[1] + n)
    assert layer.bias is dense.bias


def test_repr_names_the_rank() -> None:
    assert repr(LowRankLinear(nn.Linear(3, 4), 2)) == "LowRankLinear(in_features=3, out_features=4, rank=2, bias=True)"
    text = repr(LowRankConv2d(nn.Conv2d(3, 4, (3, 1), 2, 1), 2))
    assert text == "LowRankConv2d(3, 4, kernel_size=(3, 1), rank=2, stride=(2, 2), padding=(1, 1))"
    assert repr(PufferfishConv2d(nn.Conv2d(3, 4, (3, 1), 2, 1), 2)) == text.replace("LowRank", "Pufferfish")


@pytest.mark.parametrize("kind", FORMS)
def test_models_can_read_the_sizes_of_the_dense_layer(kind: type[LowRankConvolution]) -> None:
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    dense = nn.Conv2d(4, 8, 3, stride=2, padding=1)
    layer = kind(dense, 2)
    assert [getattr(layer, name) for name in names] == [getattr(dense, name) for name in names]
    linear = LowRankLinear(nn.Linear(6, 9), 2)
    assert (linear.in_features, linear.out_features) == (6, 9)


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect"])
def test_a_strided_1x1_convolution_reads_its_pixels_only(padding_mode: str) -> None:
    dense = nn.Conv2d(3, 5, 1, stride=(2, 3), padding=(1, 2), padding_mode=padding_mode).double()
    layer = LowRankConv2d(dense, 3)
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), dense(x), rtol=0, atol=1e-12)
