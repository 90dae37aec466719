import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedhm.lowrank.svd import factorize

sizes = st.integers(1, 12)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=60)
@given(sizes, sizes, sizes, st.integers(0, 1000))
def test_truncation_error_is_the_tail_of_the_spectrum(rows: int, columns: int, rank: int, seed: int) -> None:
    matrix = random(rows, columns, seed=seed)
    factors = factorize(matrix, rank)
    tail = torch.linalg.svdvals(matrix)[rank:]
    error = (matrix - factors.left @ factors.right).norm()
    torch.testing.assert_close(error, tail.norm(), rtol=0, atol=1e-12)
    assert float(factors.spectrum[rank:].norm()) == pytest.approx(error.item(), rel=0, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(sizes, sizes, st.data())
def test_a_smaller_rank_is_a_prefix(rows: int, columns: int, data: st.DataObject) -> None:
    matrix = random(rows, columns)
    large = data.draw(st.integers(1, min(rows, columns)))
    small = data.draw(st.integers(1, large))
    whole, part = factorize(matrix, large), factorize(matrix, small)
    left, right = whole.prefix(small)
    assert left.shape == (rows, small)
    assert right.shape == (small, columns)
    assert torch.equal(left, part.left)
    assert torch.equal(right, part.right)
    assert torch.equal(left, whole.left[:, :small])
    assert torch.equal(right, whole.right[:small])


@settings(deadline=None, max_examples=60)
@given(sizes, sizes, st.data())
def test_singular_values_are_split_evenly(rows: int, columns: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, min(rows, columns)))
    left, right, spectrum = factorize(random(rows, columns), rank)
    expected = torch.diag(spectrum[:rank])
    torch.testing.assert_close(left.T @ left, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(right @ right.T, expected, rtol=0, atol=1e-12)


def test_spectrum_is_whole_and_descending() -> None:
    matrix = random(7, 5)
    spectrum = factorize(matrix, 2).spectrum
    assert spectrum.shape == (5,)
    assert spectrum.diff().le(0).all()
    torch.testing.assert_close(spectrum.square().sum(), matrix.square().sum(), rtol=1e-13, atol=0)


def test_zero_matrix_gives_zero_factors() -> None:
    left, right, spectrum = factorize(torch.zeros(4, 6), 3)
    assert torch.equal(left, torch.zeros(4, 3))
    assert torch.equal(right, torch.zeros(3, 6))
    assert torch.equal(spectrum, torch.zeros(4))
    assert float(spectrum[2:].norm()) == 0


def test_rank_deficient_matrix_is_exact_at_its_rank() -> None:
    matrix = random(8, 2) @ random(2, 9, seed=1)
    for rank in (2, 3, 8):
        factors = factorize(matrix, rank)
        assert factors.left.isfinite().all()
        assert factors.right.isfinite().all()
        torch.testing.assert_close(factors.left @ factors.right, matrix, rtol=0, atol=1e-12)
        assert float(factors.spectrum[rank:].norm()) < 1e-12
    assert float(factorize(matrix, 1).spectrum[1:].norm()) > 0.1


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1)])
def test_a_vector_is_its_own_direction(shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    factors = factorize(matrix, 1)
    torch.testing.assert_close(factors.left @ factors.right, matrix, rtol=0, atol=1e-14)
    torch.testing.assert_close(factors.spectrum, matrix.norm()[None], rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_factors_have_the_type_of_the_matrix(dtype: torch.dtype) -> None:
    matrix = random(6, 5).to(dtype)
    factors = factorize(matrix, 5)
    assert factors.left.dtype == factors.right.dtype == dtype
    recovered = factors.left.double() @ factors.right.double()
    # a backward stable decomposition is off by a small multiple of (M + N) units in the last place of the norm
    assert (recovered - matrix.double()).norm() < 2 * (6 + 5) * torch.finfo(dtype).eps * matrix.double().norm()


def test_the_matrix_is_not_changed() -> None:
    matrix = random(5, 4)
    before = matrix.clone()
    factorize(matrix, 2)
    assert torch.equal(matrix, before)
