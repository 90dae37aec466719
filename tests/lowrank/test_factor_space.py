"""Padding factors with zeros changes no step, and points of different ranks can be compared."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedhm.lowrank.factor_space import (
    FactorSpace,
    align_factors,
    complete_factors,
    mean_point,
    pad_factors,
    squared_distance,
)
from fedhm.lowrank.layers import (
    LowRank,
    LowRankConv1d,
    LowRankConv2d,
    LowRankLinear,
    PufferfishConv2d,
    largest_rank,
)
from fedhm.lowrank.svd import to_layer_factors, to_matrix_factors, unroll

CASES: dict[str, tuple[type[LowRank], nn.Module, tuple[int, ...]]] = {
    "linear": (LowRankLinear, nn.Linear(7, 5), (7,)),
    "conv": (LowRankConv2d, nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 6, 5)),
    "conv1d": (LowRankConv1d, nn.Conv1d(3, 4, 3, padding=1), (3, 6)),
    "pufferfish": (PufferfishConv2d, nn.Conv2d(3, 4, 3, padding=1, bias=False), (3, 5, 5)),
}
EXACT = {"rtol": 1e-12, "atol": 1e-13}
property_test = settings(deadline=None, max_examples=40)


def layer_of(case: str, rank: int, seed: int) -> LowRank:
    kind, dense, _ = CASES[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = kind(copy.deepcopy(dense).double(), rank)
        for factor in (layer.u, layer.v):
            nn.init.normal_(factor)
    return layer


def padded(layer: LowRank, case: str, rank: int) -> LowRank:
    wider = CASES[case][0](copy.deepcopy(CASES[case][1]).double(), rank, spectral=False)
    wider.bias = copy.deepcopy(layer.bias)
    u, v = pad_factors(layer.u.detach(), layer.v.detach(), rank)
    wider.u, wider.v = nn.Parameter(u), nn.Parameter(v)
    return wider


def sgd_step(layer: LowRank, x: Tensor, target: Tensor, lr: float) -> None:
    layer.zero_grad()
    ((layer(x) - target) ** 2).mean().backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            assert parameter.grad is not None
            parameter -= lr * parameter.grad


@property_test
@given(
    st.sampled_from(sorted(CASES)), st.integers(1, 3), st.integers(0, 4), st.integers(1, 5), st.integers(0, 2**20),
    st.floats(1e-3, 0.3),
)  # fmt: skip
def test_steps_on_padded_factors_are_the_same(
    case: str, rank: int, more: int, steps: int, seed: int, lr: float
) -> None:
    own = layer_of(case, rank, seed)
    wide = padded(own, case, rank + more)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(4, *CASES[case][2], generator=generator, dtype=torch.float64)
        target = torch.randn(own(x).shape, generator=generator, dtype=torch.float64)
        sgd_step(own, x, target, lr)
        sgd_step(wide, x, target, lr)
    torch.testing.assert_close(wide.u[:rank], own.u, **EXACT)
    torch.testing.assert_close(wide.v[:, :rank], own.v, **EXACT)
    assert not wide.u[rank:].any()  # to the last bit
    assert not wide.v[:, rank:].any()
    torch.testing.assert_close(wide.weight, own.weight, **EXACT)


def factors_of(weight: Tensor, form: str, rank: int) -> tuple[Tensor, Tensor]:
    kind = {"spatial": LowRankConv2d, "pufferfish": PufferfishConv2d}[form] if weight.ndim == 4 else LowRankLinear
    dense = nn.Conv2d(weight.shape[1], len(weight), 3) if weight.ndim == 4 else nn.Linear(*weight.shape[::-1])
    dense.weight = nn.Parameter(weight)
    layer = kind(dense, rank)
    return layer.u.detach(), layer.v.detach()


shapes = st.sampled_from([(5, 7), (7, 5), (4, 3, 3, 3), (2, 6, 3, 3)])


@property_test
@given(shapes, st.sampled_from(["spatial", "pufferfish"]), st.integers(1, 4), st.integers(0, 2**20))
def test_a_dense_layer_has_the_factors_of_full_rank(shape: tuple[int, ...], form: str, rank: int, seed: int) -> None:
    """At the start they are those of a decomposition, which begin with the factors of smaller ranks."""
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    full = largest_rank(weight.shape, form)  # type: ignore[arg-type]
    rank = min(rank, full)
    u, v = factors_of(weight, form, rank)
    whole = complete_factors(weight, u, v)
    assert torch.equal(whole[0][:rank], u)
    assert torch.equal(whole[1][:, :rank], v)
    left, right = to_matrix_factors(*whole)
    matrix = unroll(weight, form)  # type: ignore[arg-type]
    spectrum = torch.diag(torch.linalg.svdvals(matrix))
    for found, exact in ((left @ right, matrix), (left.T @ left, spectrum), (right @ right.T, spectrum)):
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


@property_test
@given(shapes, st.floats(0, 0.2), st.integers(0, 2**20))
def test_aligned_factors_are_the_nearest_of_a_weight(shape: tuple[int, ...], move: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, change = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    full = largest_rank(weight.shape)
    before = factors_of(weight, "spatial", full)
    moved = weight + move * change
    u, v = align_factors(moved, *before)
    left, right = to_matrix_factors(u, v)
    product = to_matrix_factors(*factors_of(moved, "spatial", full))
    torch.testing.assert_close(left @ right, product[0] @ product[1], rtol=1e-9, atol=1e-9)

    def apart(turned: Tensor) -> float:
        pair = to_layer_factors(left @ turned, turned.T @ right, weight.shape)
        return float(sum((a - b).square().sum() for a, b in zip(pair, before, strict=True)))

    here = apart(torch.eye(full, dtype=torch.float64))
    if not move:
        assert here < 1e-18
    for _ in range(5):  # no small rotation of them is nearer
        skew = torch.randn(full, full, generator=generator, dtype=torch.float64)
        assert here <= apart(torch.linalg.matrix_exp(0.1 * (skew - skew.T))) + 1e-12


def test_points_of_different_ranks() -> None:
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shared = {"a.bias": torch.ones(6), "first.weight": torch.ones(2, 2)}
    sent = [
        ({"a": rank}, {**shared, **dict(zip(("a.u", "a.v"), factors_of(weight, "spatial", rank), strict=True))})
        for rank in (4, 2)
    ]
    space = FactorSpace.of(sent)
    assert space.ranks == {"a": 4}
    points = [space.start(tensors) for _, tensors in sent]
    spectrum = torch.linalg.svdvals(weight)
    # the analysis: ‖ȳ − y_p‖² = 2 ‖mean √Σ − √Σ_p‖²
    expected = 2 * (spectrum[2:4].sqrt() / 2).square().sum().item()
    mean = mean_point((1, each) for each in points)
    assert [squared_distance(mean, each) for each in points] == pytest.approx([expected] * 2)
    tensors = space.tensors(mean, sent[1][1])
    assert tensors.keys() == sent[0][1].keys()
    assert tensors["a.u"].shape == (4, 8)
    weighted = mean_point([(3, points[0]), (1, points[1])])
    torch.testing.assert_close(weighted["a.u"], 0.75 * points[0]["a.u"] + 0.25 * points[1]["a.u"])
    dense = [*sent, ({}, {**shared, "a.weight": weight})]
    space = FactorSpace.of(dense)
    assert space.ranks == {"a": 6}
    assert [squared_distance(space.start(dense[2][1]), space.start(dense[1][1]))] == pytest.approx(
        [2 * spectrum[2:].sum().item()]
    )
    assert squared_distance(space.start(dense[2][1]), space.end(dense[2][1])) < 1e-18
    assert FactorSpace.of([({}, shared)]).ranks == {}
