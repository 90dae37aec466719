"""Warm-started decompositions: as good as they claim, and exact where the claim cannot be made."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedhm.errors import FedhmError
from fedhm.lowrank import svd as warm
from fedhm.lowrank.svd import TOLERANCE, Factors, decompose, factorize, refactorize, spare_directions, worst_ratio

SPECTRA = {
    "flat": lambda n: torch.linspace(1, 0.2, n),
    "falling": lambda n: torch.logspace(0, -4, n),
    "a cliff": lambda n: torch.cat([torch.ones(n // 5), torch.full((n - n // 5,), 1e-3)]),
    "equal": torch.ones,
}


def matrix_with(spectrum: Tensor, rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    U = torch.linalg.qr(torch.randn(rows, len(spectrum), generator=generator)).Q
    V = torch.linalg.qr(torch.randn(columns, len(spectrum), generator=generator)).Q
    return (U * spectrum) @ V.T


def error_ratio(matrix: Tensor, factors: Factors, rank: int) -> float:
    left, right = factors.prefix(rank)
    error = (matrix.double() - left.double() @ right.double()).norm()
    return float(error / torch.linalg.svdvals(matrix.double())[rank:].norm())


@pytest.mark.parametrize("kind", SPECTRA)
@settings(max_examples=12, deadline=None)
@given(
    shape=st.sampled_from([(256, 256), (256, 400), (400, 256)]),
    rank=st.sampled_from([1, 20, 64, 100]),
    drift=st.sampled_from([0.0, 1e-3, 0.03, 0.3]),
    seed=st.integers(0, 1000),
)
def test_every_round_is_within_the_tolerance(
    kind: str, shape: tuple[int, int], rank: int, drift: float, seed: int
) -> None:
    matrix = matrix_with(SPECTRA[kind](256), *shape, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    factors, _ = decompose(matrix, rank, None)
    for _ in range(3):
        matrix = matrix + drift * matrix.norm() * torch.randn(shape, generator=generator) / math.prod(shape) ** 0.5
        factors, _ = decompose(matrix, rank, factors)
        assert error_ratio(matrix, factors, rank) <= TOLERANCE
        assert len(factors.right) == rank + spare_directions(rank, 256)


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(sorted(SPECTRA)),
    rank=st.sampled_from([8, 40]),
    drift=st.sampled_from([0.0, 1e-3, 0.01, 0.1, 1.0]),
    seed=st.integers(0, 1000),
)
def test_the_bound_is_above_the_true_ratio(kind: str, rank: int, drift: float, seed: int) -> None:
    before = matrix_with(SPECTRA[kind](120), 120, 150, seed)
    noise = torch.randn(120, 150, generator=torch.Generator().manual_seed(seed + 1))
    after = before + drift * before.norm() * noise / noise.norm()
    basis = torch.linalg.svd(before, full_matrices=False).Vh[: rank + 16]
    found = warm._one_pass(after, basis)
    if found is None:
        return
    factors = Factors(found.left * found.spectrum.float(), found.right, found.spectrum)
    optimum = torch.linalg.svdvals(after.double())[rank:].norm()
    if optimum**2 < 1e-5 * after.norm() ** 2:
        return  # the error is rounding, and so is its ratio
    bound = worst_ratio(after, rank, found.left, found.spectrum, found.turned)
    assert bound >= error_ratio(after, factors, rank) * (1 - 1e-4)


def test_the_angles_are_those_between_the_bases() -> None:
    matrix = matrix_with(SPECTRA["flat"](120), 120, 150, 1)
    basis = torch.linalg.qr(torch.randn(150, 30, generator=torch.Generator().manual_seed(2))).Q.T
    found = warm._one_pass(matrix, basis)
    assert found is not None
    torch.testing.assert_close(found.turned, basis @ found.right.T, rtol=0, atol=1e-5)


def test_little_drift_is_found_without_an_exact_decomposition() -> None:
    for kind in ("flat", "falling", "a cliff"):
        matrix = matrix_with(SPECTRA[kind](300), 300, 300, 1)
        factors, exact = decompose(matrix, 60, None)
        assert exact
        noise = torch.randn(300, 300, generator=torch.Generator().manual_seed(2))
        drifted = matrix + 1e-3 * matrix.norm() * noise / noise.norm()
        factors, exact = decompose(drifted, 60, factors)
        assert not exact, kind
        assert error_ratio(drifted, factors, 60) < TOLERANCE


def test_another_matrix_altogether_is_decomposed_exactly() -> None:
    known, _ = decompose(matrix_with(SPECTRA["flat"](300), 300, 300, 1), 60, None)
    other = matrix_with(SPECTRA["flat"](300), 300, 300, 5)
    factors, exact = decompose(other, 60, known)
    assert exact
    assert error_ratio(other, factors, 60) == pytest.approx(1, abs=1e-5)


def test_a_direction_that_nobody_knew_is_not_missed() -> None:
    """It is orthogonal to all that is known, so that no pass can see it: only the bound does."""
    spectrum = torch.linspace(1, 0.5, 300)
    U = torch.linalg.qr(torch.randn(300, 300, generator=torch.Generator().manual_seed(1))).Q
    matrix = (U * spectrum) @ U.T
    known, _ = decompose(matrix, 40, None)
    spectrum[200] = 3.0
    matrix = (U * spectrum) @ U.T
    factors, exact = decompose(matrix, 40, known)
    assert exact
    assert error_ratio(matrix, factors, 40) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_matrix_is_not_approved(broken: float) -> None:
    matrix = matrix_with(SPECTRA["flat"](300), 300, 300, 1)
    known, _ = decompose(matrix, 60, None)
    matrix[0, 0] = broken
    with pytest.raises(FedhmError, match="diverged"):
        decompose(matrix, 60, known)


def test_a_matrix_of_low_rank_and_zero() -> None:
    matrix = matrix_with(torch.linspace(1, 0.5, 10), 300, 300, 1)
    known, _ = decompose(matrix, 60, None)
    for now in (matrix * 1.1, torch.zeros(300, 300)):
        factors, _ = decompose(now, 60, known)
        left, right = factors.prefix(60)
        torch.testing.assert_close(left @ right, now, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 4, 8, 40])
def test_after_a_matrix_of_zeros(rank: int) -> None:
    known, _ = decompose(torch.zeros(300, 300), rank, None)
    matrix = matrix_with(SPECTRA["flat"](300), 300, 300, 1)
    factors, exact = decompose(matrix, rank, known)
    assert exact
    assert error_ratio(matrix, factors, rank) == pytest.approx(1, abs=1e-5)


def test_nothing_is_left_beyond_the_kept_directions() -> None:
    spectrum = torch.cat([torch.linspace(1, 0.5, 52), torch.zeros(248)])
    matrix = matrix_with(spectrum[:52], 300, 300, 1)
    known = factorize(matrix, 52)
    found = refactorize(matrix * 1.01, 36, known)
    assert found is not None
    assert error_ratio(matrix * 1.01, found, 36) <= TOLERANCE


def test_small_layers_and_other_precisions_are_always_exact() -> None:
    for matrix in (torch.randn(100, 100), torch.randn(300, 300).double()):
        known, _ = decompose(matrix, 20, None)
        _, exact = decompose(matrix, 20, known)
        assert exact


def test_the_same_input_gives_the_same_bits() -> None:
    matrix = matrix_with(SPECTRA["falling"](300), 300, 300, 1)
    known = factorize(matrix, 76)
    noise = torch.randn(300, 300, generator=torch.Generator().manual_seed(2))
    drifted = matrix + 1e-3 * matrix.norm() * noise / noise.norm()
    first, second = refactorize(drifted, 60, known), refactorize(drifted, 60, known)
    assert first is not None
    assert second is not None
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
