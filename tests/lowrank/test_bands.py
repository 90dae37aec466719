"""Bands of a change, and their mean, against the formulas written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedhm.lowrank.average import RankLevel, SingularDirections, mean_by_bands, singular_directions
from fedhm.lowrank.svd import factorize

M, N = 9, 7


def matrix(seed: int, rows: int = M, columns: int = N) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def known(seed: int) -> SingularDirections:
    return singular_directions(factorize(matrix(seed), N))


def beyond(change: Tensor, at: SingularDirections, rank: int) -> Tensor:
    """What is left of a change that no small step of the factors can make, by two products."""
    left, right = at.left[:, :rank], at.right[:rank]
    rest = change - left @ (left.T @ change)
    return rest - (rest @ right.T) @ right


def tangent(change: Tensor, at: SingularDirections, rank: int) -> Tensor:
    """T_r(D) as in the formula, with the projections as matrices."""
    left, right = at.left[:, :rank], at.right[:rank]
    outside_left = torch.eye(M, dtype=torch.float64) - left @ left.T
    outside_right = torch.eye(N, dtype=torch.float64) - right.T @ right
    return change - outside_left @ change @ outside_right


def bands(change: Tensor, at: SingularDirections, ranks: list[int]) -> list[Tensor]:
    """The bands of a change whose own rank is the last of `ranks`."""
    found, so_far = [], torch.zeros_like(change)
    for rank in ranks[:-1]:
        found.append(tangent(change, at, rank) - so_far)
        so_far = tangent(change, at, rank)
    return [*found, change - so_far]


@settings(deadline=None)
@given(seed=st.integers(0, 1000), rank=st.integers(1, N))
def test_what_lies_beyond_a_rank_is_what_the_tangent_projection_leaves(seed: int, rank: int) -> None:
    change, at = matrix(seed), known(seed + 1)
    torch.testing.assert_close(beyond(change, at, rank), change - tangent(change, at, rank))
    torch.testing.assert_close(beyond(beyond(change, at, rank), at, rank), beyond(change, at, rank))


@settings(deadline=None)
@given(seed=st.integers(0, 1000), rank=st.integers(1, N))
def test_small_steps_of_the_factors_have_nothing_beyond_their_rank(seed: int, rank: int) -> None:
    factors = factorize(matrix(seed), rank)
    left, right = factors.prefix(rank)
    step = matrix(seed + 1, M, rank) @ right + left @ matrix(seed + 2, rank, N)
    assert beyond(step, singular_directions(factors), rank).norm() < 1e-10 * step.norm()


@settings(deadline=None)
@given(seed=st.integers(0, 1000), ranks=st.lists(st.integers(1, N), min_size=1, max_size=4, unique=True))
def test_the_bands_of_a_change_sum_to_it(seed: int, ranks: list[int]) -> None:
    change, at = matrix(seed), known(seed + 1)
    torch.testing.assert_close(sum(bands(change, at, sorted(ranks)), torch.zeros_like(change)), change)


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    ranks=st.lists(st.integers(1, N), min_size=2, max_size=5),
    weights=st.lists(st.floats(0.1, 4), min_size=5, max_size=5),
)
def test_each_band_is_averaged_over_those_who_reach_it(seed: int, ranks: list[int], weights: list[float]) -> None:
    factors, levels = factorize(matrix(seed), N), sorted(set(ranks))
    at = singular_directions(factors)
    changes = [matrix(seed + 1 + number) for number in range(len(ranks))]
    expected = torch.zeros(M, N, dtype=torch.float64)
    for place, lowest in enumerate(levels):
        reaching = [(c, r, w) for c, r, w in zip(changes, ranks, weights, strict=False) if r >= lowest]
        parts = [w * bands(c, at, [x for x in levels if x <= r])[place] for c, r, w in reaching]
        expected += sum(parts, torch.zeros_like(expected)) / sum(w for _, _, w in reaching)

    given_levels = [RankLevel(r, w * c, w) for c, r, w in zip(changes, ranks, weights, strict=False)]
    torch.testing.assert_close(mean_by_bands(given_levels, factors), expected, rtol=1e-9, atol=1e-9)

    def sent_at(rank: int) -> Tensor:
        left, right = factors.prefix(rank)
        return left @ right

    whole = [RankLevel(r, w * (c + sent_at(r)), w, r) for c, r, w in zip(changes, ranks, weights, strict=False)]
    torch.testing.assert_close(mean_by_bands(whole, factors), expected, rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(seed=st.integers(0, 1000), speed=st.floats(0, 1), sent=st.booleans())
def test_their_speed_is_between_that_mean_and_the_one_over_everybody(seed: int, speed: float, sent: bool) -> None:
    factors, ranks, weights = factorize(matrix(seed), N), [2, 4, N], [1.0, 3.0, 0.5]
    left, right = factors.left, factors.right

    def levels() -> list[RankLevel]:  # made for each call, which uses their totals up
        found = []
        for place, (rank, weight) in enumerate(zip(ranks, weights, strict=True)):
            change = matrix(seed + 1 + place)
            model = change + left[:, :rank] @ right[:rank]
            found.append(RankLevel(rank, weight * (model if sent else change), weight, rank if sent else 0))
        return found

    changes = [weight * matrix(seed + 1 + place) for place, weight in enumerate(weights)]
    everybody = sum(changes, torch.zeros(M, N, dtype=torch.float64)) / sum(weights)
    expected = torch.lerp(everybody, mean_by_bands(levels(), factors), speed)
    torch.testing.assert_close(mean_by_bands(levels(), factors, speed), expected, rtol=1e-9, atol=1e-9)


def test_one_rank_has_one_band() -> None:
    levels = [RankLevel(3, matrix(1), 1.0), RankLevel(3, matrix(2), 2.0)]
    torch.testing.assert_close(mean_by_bands(levels, factorize(matrix(0), N)), (matrix(1) + matrix(2)) / 3)


@pytest.mark.parametrize("zero", [0, 3, N])
def test_directions_that_became_zero_reach_nothing(zero: int) -> None:
    factors = factorize(matrix(0), N)
    factors.right[zero:] = 0
    at = singular_directions(factors)
    assert bool(at.right.isfinite().all())
    torch.testing.assert_close(at.right[:zero] @ at.right[:zero].T, torch.eye(zero, dtype=torch.float64))
    assert not at.right[zero:].any()
