"""Composed weights against their formulas, written out with mode products."""

import pytest
import torch
from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.lowrank.hadamard import (
    HadamardConv2d,
    HadamardLinear,
    Half,
    factor_deviation,
    hadamard_parameters,
    hadamard_rank,
    plan_hadamard,
)
from fedhm.lowrank.hybrid import plan_of, to_full, to_hadamard
from fedhm.models import cnn

TIGHT = {"rtol": 0.0, "atol": 1e-12}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mode_product(tensor: Tensor, matrix: Tensor, mode: int) -> Tensor:
    """tensor ×_mode matrix: every fibre along the axis is multiplied by the matrix."""
    moved = tensor.movedim(mode, 0)
    product = matrix @ moved.reshape(len(moved), -1)
    return product.reshape(len(matrix), *moved.shape[1:]).movedim(0, mode)


def composed(half: Half) -> Tensor:
    if half.t is None:
        return sum(torch.outer(x, y) for x, y in zip(half.x.T, half.y.T, strict=True))  # type: ignore[return-value]
    return mode_product(mode_product(half.t, half.x, 0), half.y, 1)


def test_a_linear_weight_is_the_product_of_two_low_rank_matrices() -> None:
    dense = nn.Linear(7, 5, dtype=torch.float64)
    layer = HadamardLinear(dense, 2, generator())
    weight = composed(layer.first) * composed(layer.second)
    torch.testing.assert_close(layer.weight, weight, **TIGHT)
    x = torch.randn(3, 7, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ weight.T + dense.bias, **TIGHT)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [0, (1, 2), "same"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_kernel_is_the_product_of_two_tensors_of_low_rank(mode: str, padding: int | str, bias: bool) -> None:
    stride = 1 if padding == "same" else (2, 1)
    dense = nn.Conv2d(4, 6, (3, 5), stride, padding, dilation=(2, 1), bias=bias, padding_mode=mode, dtype=torch.float64)
    layer = HadamardConv2d(dense, 2, generator())
    assert not torch.equal(layer.first.x, layer.second.x)
    weight = composed(layer.first) * composed(layer.second)
    assert weight.shape == dense.weight.shape
    torch.testing.assert_close(layer.weight, weight, **TIGHT)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), dense._conv_forward(x, weight, dense.bias), **TIGHT)


def test_few_factors_reach_a_rank_that_two_factors_cannot() -> None:
    linear = HadamardLinear(nn.Linear(40, 30, dtype=torch.float64), 4, generator())
    assert torch.linalg.matrix_rank(linear.first()) == 4
    assert torch.linalg.matrix_rank(linear.weight) == 16
    kernel = HadamardConv2d(nn.Conv2d(20, 25, 3, dtype=torch.float64), 3, generator()).weight
    for unfolded in (kernel.flatten(1), kernel.movedim(1, 0).flatten(1)):
        assert torch.linalg.matrix_rank(unfolded) == 9


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_parameters_are_those_that_the_paper_counts(rank: int) -> None:
    linear = HadamardLinear(nn.Linear(12, 20, bias=False), rank)
    conv = HadamardConv2d(nn.Conv2d(12, 20, (3, 2), bias=False), rank)
    for layer, shape, published in (
        (linear, torch.Size((20, 12)), 2 * rank * (20 + 12)),
        (conv, torch.Size((20, 12, 3, 2)), 2 * rank * (20 + 12) + 2 * rank**2 * 3 * 2),
    ):
        assert sum(p.numel() for p in layer.parameters()) == published == hadamard_parameters(shape, rank)


@pytest.mark.parametrize("shape", [(256, 200), (300, 50), (64, 64, 3, 3), (128, 64, 3, 3), (32, 20, 5, 1)])
def test_ranks_lie_between_full_rank_and_no_saving(shape: tuple[int, ...]) -> None:
    size = torch.Size(shape)
    smallest, largest = hadamard_rank(size, 0), hadamard_rank(size, 0.99)
    assert isinstance(smallest, int)
    assert isinstance(largest, int)
    assert (smallest - 1) ** 2 < min(shape[:2]) <= smallest**2
    limit = next(rank for rank in range(1, 1000) if hadamard_parameters(size, rank + 1) > size.numel())
    middle = hadamard_rank(size, 0.5)
    assert middle == round(0.5 * smallest + 0.5 * limit)
    assert smallest <= middle <= largest <= limit
    assert hadamard_rank(size, 1) == limit


def test_a_rank_that_saves_nothing_is_no_rank() -> None:
    assert hadamard_rank(torch.Size((256, 256)), 1) == "rank 64 would hold 65,536 parameters instead of 65,536"
    assert hadamard_rank(torch.Size((2, 2, 3, 3)), 0) == "rank 2 would hold 88 parameters instead of 36"


def test_the_papers_own_example() -> None:
    """A 256×256 matrix reaches full rank with 16,384 parameters, at R = 16."""
    assert hadamard_rank(torch.Size((256, 256)), 0) == 16
    assert hadamard_parameters(torch.Size((256, 256)), 16) == 16_384
    assert hadamard_parameters(torch.Size((256, 256, 3, 3)), 16) == 20_992


def test_the_composed_weight_is_as_large_as_the_dense_one() -> None:
    torch.manual_seed(0)
    for dense in (nn.Linear(300, 200), nn.Conv2d(64, 80, 3)):
        nn.init.kaiming_normal_(dense.weight)
        make = HadamardLinear if isinstance(dense, nn.Linear) else HadamardConv2d
        weights = torch.stack([make(dense, 9, generator(seed)).weight.detach() for seed in range(20)])  # type: ignore
        assert weights.var().item() == pytest.approx(dense.weight.var().item(), rel=0.05)
        assert abs(weights.mean().item()) < 0.02 * dense.weight.std().item()
    # in closed form: W = x₁ y₁ x₂ y₂ at rank 1
    assert factor_deviation(torch.full((2, 2), 0.3), 1) ** 4 == pytest.approx(0.3)
    assert factor_deviation(torch.full((2, 2, 1, 1), 0.3), 1) ** 6 == pytest.approx(0.3)


def test_every_factor_learns() -> None:
    for layer, x in (
        (HadamardLinear(nn.Linear(5, 4), 2, generator()), torch.randn(3, 5)),
        (HadamardConv2d(nn.Conv2d(5, 4, 3), 2, generator()), torch.randn(3, 5, 6, 6)),
    ):
        layer(x).square().sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in layer.parameters())


def test_a_network_of_composed_layers_and_its_full_state() -> None:
    torch.manual_seed(0)
    model = cnn(num_classes=10, in_channels=1).double().eval()
    plan = plan_hadamard(model, 0.1)
    assert plan
    network = to_hadamard(model, plan, generator())
    assert plan_of(network) == {}
    full = cnn(num_classes=10, in_channels=1).double().eval()
    full.load_state_dict(to_full(network), strict=True)
    x = torch.randn(2, 1, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(network(x), full(x), **TIGHT)
    assert not any(p.any() for name in plan for p in to_hadamard(model, plan).get_submodule(name).first.parameters())


def test_what_stays_dense_and_why() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.Conv2d(32, 32, 1),
        nn.Conv2d(32, 32, 3),
        nn.Conv2d(32, 32, 3, groups=2),
        nn.Conv2d(32, 32, 3),
        nn.Conv2d(32, 32, 3),
        nn.Linear(4, 32),
        nn.Linear(32, 10),
    )
    model[4].requires_grad_(False)
    nn.init.zeros_(model[5].weight)
    plan = plan_hadamard(model, 0.1)
    assert dict(plan) == {"2": round(0.9 * 6 + 0.1 * 19)}
    assert [plan.dense[str(number)] for number in (0, 1, 3, 4, 5, 6, 7)] == [
        "among the first 1 layers",
        "a 1×1 convolution",
        "a grouped convolution (2 groups)",
        "it is frozen, and factors start at random",
        "it starts at 0, where factors have no gradient",
        "rank 2 would hold 144 parameters instead of 128",
        "the classifier",
    ]


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(FedhmError, match="no such layer"):
        to_hadamard(nn.Sequential(nn.Linear(4, 4)), {"3": 2})


def test_the_smallest_rank_is_exact_at_squares() -> None:
    assert [hadamard_rank(torch.Size((size, 10_000)), 0) for size in (63, 64, 65)] == [8, 8, 9]
