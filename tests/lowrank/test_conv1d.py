"""Conv1d layers, factorized: a convolution of all taps into few channels, and one of a single tap out of them."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedhm.lowrank.decay import add_frobenius_decay, low_rank_layers
from fedhm.lowrank.hadamard import HadamardConv1d
from fedhm.lowrank.hybrid import to_full, to_hadamard, to_hybrid
from fedhm.lowrank.layers import LowRankConv1d, LowRankConv2d, PufferfishConv2d, largest_rank
from fedhm.lowrank.plan import RankPlan, plan_ranks
from fedhm.measure.cost import measure, training_memory

TIGHT = {"rtol": 0.0, "atol": 1e-12}
LENGTH = 11


@st.composite
def convolutions(draw: Callable) -> nn.Conv1d:
    """A random convolution of every kind that keeps inputs of length 11 legal: the dilated kernel spans at most 10."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    padding = draw(st.sampled_from(["same", "valid"]) | st.integers(0, 3))
    kernel, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    if padding == "same":  # of even kernels torch warns that it copies
        kernel, stride = draw(st.sampled_from([1, 3])), 1
    return nn.Conv1d(
        draw(st.integers(1, 5)),
        draw(st.integers(1, 5)),
        kernel,
        stride=stride,
        padding=padding,
        dilation=draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
        dtype=torch.float64,
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=250)
@given(convolutions(), st.booleans(), st.data())
def test_the_pair_equals_the_dense_convolution_with_the_recovered_kernel(
    dense: nn.Conv1d, batched: bool, data: st.DataObject
) -> None:
    layer = LowRankConv1d(dense, data.draw(st.integers(1, largest_rank(dense.weight.shape))))
    shape = (2, dense.in_channels, LENGTH) if batched else (dense.in_channels, LENGTH)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y, expected = layer(x), dense._conv_forward(x, layer.weight, dense.bias)
    torch.testing.assert_close(y, expected, **TIGHT)
    direction, inputs = torch.randn_like(y), [x, layer.u, layer.v]
    for one, other in zip(*(torch.autograd.grad(out, inputs, direction) for out in (y, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@settings(deadline=None, max_examples=60)
@given(convolutions())
def test_at_full_rank_it_is_the_original(dense: nn.Conv1d) -> None:
    layer = LowRankConv1d(dense, largest_rank(dense.weight.shape))
    x = torch.randn(2, dense.in_channels, LENGTH, dtype=torch.float64)
    torch.testing.assert_close(layer.weight, dense.weight, **TIGHT)
    torch.testing.assert_close(layer(x), dense(x), **TIGHT)


@pytest.mark.parametrize("kind", [LowRankConv2d, PufferfishConv2d])
def test_it_is_the_column_of_a_convolution_in_two_dimensions(kind: type[LowRankConv2d | PufferfishConv2d]) -> None:
    dense = nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, dtype=torch.float64)
    column = nn.Conv2d(4, 6, (3, 1), stride=(2, 1), padding=(1, 0), dilation=(2, 1), dtype=torch.float64)
    column.weight, column.bias = nn.Parameter(dense.weight.detach()[..., None]), dense.bias
    x = torch.randn(2, 4, LENGTH, dtype=torch.float64)
    torch.testing.assert_close(LowRankConv1d(dense, 3)(x), kind(column, 3)(x[..., None])[..., 0], **TIGHT)


def test_the_weight_is_the_best_of_its_rank() -> None:
    dense = nn.Conv1d(4, 7, 3, dtype=torch.float64)
    layer = LowRankConv1d(dense, 3)
    spectrum = torch.linalg.svdvals(dense.weight.detach().flatten(1))
    error = (layer.weight - dense.weight).norm().item()
    assert error == pytest.approx(float(spectrum[3:].norm()), rel=1e-12)
    assert layer.u.numel() + layer.v.numel() == 3 * (4 * 3 + 7)
    assert repr(layer) == "LowRankConv1d(4, 7, kernel_size=(3,), rank=3, stride=(1,), padding=(0,))"


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_same_padding_of_an_even_kernel(mode: str) -> None:
    dense = nn.Conv1d(2, 3, 4, padding="same", padding_mode=mode, dtype=torch.float64)
    layer, x = LowRankConv1d(dense, 2), torch.randn(2, 2, LENGTH, dtype=torch.float64)
    assert layer(x).shape == (2, 3, LENGTH)
    torch.testing.assert_close(layer(x), dense._conv_forward(x, layer.weight, dense.bias), **TIGHT)


def signals() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(3, 16, 5, padding=2),
        nn.ReLU(),
        nn.Conv1d(16, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv1d(24, 24, 1),
        nn.Conv1d(24, 24, 3, groups=3),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(24, 4),
    )


@pytest.mark.parametrize("form", ["spatial", "pufferfish"])
def test_a_plan_treats_it_as_a_convolution(form: str) -> None:
    plan = plan_ranks(signals(), 1 / 4, form=form)  # type: ignore[arg-type]
    assert plan == {"2": 6, "4": 6}  # of 24 output channels
    assert plan.dense == {
        "0": "among the first 1 layers",
        "5": "a grouped convolution (3 groups)",
        "8": "the classifier",
    }
    assert plan_ranks(signals(), 1 / 4, keep=0, pointwise=False).dense["4"] == "a 1×1 convolution"
    assert plan_ranks(nn.Conv1d(8, 8, 1), 1 / 2, 0, classifier=None).dense == {
        "": "rank 4 would hold 64 parameters instead of 64"
    }


def test_a_hybrid_network_is_recovered_and_costs_what_its_factors_cost() -> None:
    model = signals()
    hybrid = to_hybrid(model, plan_ranks(model, 1 / 4, dense=["4"]))
    full, small = measure(model, (3, 20)), measure(hybrid, (3, 20))
    dense, factored = 24 * 16 * 3, 6 * (16 * 3 + 24)
    assert full.parameters - small.parameters == dense - factored
    assert full.macs - small.macs == 10 * (dense - factored)  # at 10 positions
    assert small.bytes == 4 * small.parameters
    model.load_state_dict(to_full(hybrid), strict=True)
    x = torch.randn(2, 3, 20)
    torch.testing.assert_close(model(x), hybrid(x))


def test_wide_factorized_layers_take_less_memory_to_train() -> None:
    """Of narrow ones that is not so: the code of a second convolution takes more than its weights save."""

    def wide() -> nn.Module:
        return nn.Sequential(nn.Conv1d(3, 256, 5), nn.Conv1d(256, 256, 5), nn.Flatten(), nn.Linear(256 * 12, 3))

    hybrid = to_hybrid(wide(), plan_ranks(wide(), 1 / 8))
    assert training_memory(hybrid, (3, 20), 1) < 0.75 * training_memory(wide(), (3, 20), 1)


def test_decay_is_the_gradient_of_the_products_norm() -> None:
    hybrid = to_hybrid(signals().double(), RankPlan({"0": 2, "2": 3}))
    hybrid(torch.randn(2, 3, 20, dtype=torch.float64)).square().sum().backward()
    expected = {}
    for name in ("0", "2"):
        layer = hybrid.get_submodule(name)
        norm = 0.3 / 2 * layer.weight.square().sum()
        for part, gradient in zip("uv", torch.autograd.grad(norm, [layer.u, layer.v]), strict=True):
            expected[f"{name}.{part}"] = getattr(layer, part).grad + gradient
            assert gradient.norm() > 1e-3
    add_frobenius_decay(low_rank_layers(hybrid), 0.3)
    for name, gradient in expected.items():
        torch.testing.assert_close(hybrid.get_parameter(name).grad, gradient, **TIGHT)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
def test_hadamard_factors_compose_its_kernel(mode: str) -> None:
    dense = nn.Conv1d(4, 6, 3, 2, 2, dilation=2, padding_mode=mode, dtype=torch.float64)
    network = nn.Sequential(dense)
    composed = to_hadamard(network, {"0": 2}, torch.Generator().manual_seed(0))
    assert isinstance(composed[0], HadamardConv1d)
    first, second = (torch.einsum("abk,na,mb->nmk", h.t, h.x, h.y) for h in (composed[0].first, composed[0].second))
    torch.testing.assert_close(composed[0].weight, first * second, **TIGHT)
    x = torch.randn(2, 4, LENGTH, dtype=torch.float64)
    torch.testing.assert_close(composed(x), dense._conv_forward(x, first * second, dense.bias), **TIGHT)
    network.load_state_dict(to_full(composed), strict=True)
    torch.testing.assert_close(network(x), composed(x), **TIGHT)
