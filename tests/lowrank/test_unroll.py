import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhm.lowrank.svd import Form, roll, to_layer_factors, to_matrix_factors, unroll, unrolled_shape

forms = st.sampled_from(["spatial", "pufferfish"])
sizes = st.integers(1, 5)
shapes = st.lists(sizes, min_size=2, max_size=4).map(torch.Size)


def test_rows_are_input_and_vertical_offset_columns_are_output_and_horizontal_offset() -> None:
    n, m, k1, k2 = 2, 3, 4, 5
    weight = torch.arange(n * m * k1 * k2).reshape(n, m, k1, k2)
    matrix = unroll(weight)
    assert matrix.shape == (m * k1, n * k2)
    for out in range(n):
        for into in range(m):
            for down in range(k1):
                for across in range(k2):
                    assert matrix[into * k1 + down, out * k2 + across] == weight[out, into, down, across]


def test_in_pufferfishs_form_columns_are_output_channels() -> None:
    n, m, k1, k2 = 2, 3, 4, 5
    weight = torch.arange(n * m * k1 * k2).reshape(n, m, k1, k2)
    matrix = unroll(weight, "pufferfish")
    assert matrix.shape == (m * k1 * k2, n)
    for out in range(n):
        for into in range(m):
            for down in range(k1):
                for across in range(k2):
                    assert matrix[(into * k1 + down) * k2 + across, out] == weight[out, into, down, across]


@pytest.mark.parametrize("form", ["spatial", "pufferfish"])
def test_linear_unrolls_to_its_transpose(form: Form) -> None:
    weight = torch.arange(6).reshape(2, 3)
    assert unroll(weight, form).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("form", ["spatial", "pufferfish"])
def test_linear_is_the_convolution_of_size_one(form: Form) -> None:
    weight = torch.arange(6).reshape(2, 3)
    assert torch.equal(unroll(weight, form), unroll(weight[:, :, None, None], form))


@pytest.mark.parametrize("form", ["spatial", "pufferfish"])
def test_a_kernel_with_one_axis_is_a_column_of_a_kernel_with_two(form: Form) -> None:
    weight = torch.arange(24).reshape(2, 3, 4)
    assert torch.equal(unroll(weight, form), unroll(weight[:, :, :, None], form))


@settings(deadline=None, max_examples=100)
@given(shapes, forms)
def test_roll_is_the_inverse_of_unroll(shape: torch.Size, form: Form) -> None:
    weight = torch.arange(shape.numel()).reshape(shape)
    matrix = unroll(weight, form)
    assert tuple(matrix.shape) == unrolled_shape(shape, form)
    assert torch.equal(roll(matrix, shape), weight)
    assert roll(matrix, shape).is_contiguous()
    assert torch.equal(unroll(roll(matrix, shape), form), matrix)


@settings(deadline=None, max_examples=50)
@given(shapes)
def test_where_the_shapes_of_both_forms_agree_so_do_their_matrices(shape: torch.Size) -> None:
    """So the form of a matrix can be told from its shape."""
    weight = torch.arange(shape.numel()).reshape(shape)
    spatial, pufferfish = unroll(weight), unroll(weight, "pufferfish")
    assert (spatial.shape == pufferfish.shape) == (len(shape) < 4 or shape[3] == 1)
    assert spatial.shape != pufferfish.shape or torch.equal(spatial, pufferfish)


@settings(deadline=None, max_examples=100)
@given(shapes, sizes, forms)
def test_join_is_the_inverse_of_split(shape: torch.Size, rank: int, form: Form) -> None:
    rows, columns = unrolled_shape(shape, form)
    left = torch.arange(rows * rank).reshape(rows, rank)
    right = torch.arange(rank * columns).reshape(rank, columns) + 1000
    u, v = to_layer_factors(left, right, shape)
    n, m, *kernel = shape
    if len(kernel) == 1:
        assert u.shape == (rank, m, *kernel)
        assert v.shape == (n, rank, 1)
    elif kernel and form == "pufferfish":
        assert u.shape == (rank, m, *kernel)
        assert v.shape == (n, rank, 1, 1)
    elif kernel:
        assert u.shape == (rank, m, kernel[0], 1)
        assert v.shape == (n, rank, 1, kernel[1])
    else:
        assert u.shape == (rank, m)
        assert v.shape == (n, rank)
    assert u.is_contiguous()
    assert v.is_contiguous()
    joined = to_matrix_factors(u, v)
    assert torch.equal(joined[0], left)
    assert torch.equal(joined[1], right)
    again = to_layer_factors(*joined, shape)
    assert torch.equal(again[0], u)
    assert torch.equal(again[1], v)


def test_split_puts_each_direction_in_one_channel() -> None:
    n, m, k1, k2, rank = 2, 3, 4, 5, 6
    left = torch.arange(m * k1 * rank).reshape(m * k1, rank)
    right = torch.arange(rank * n * k2).reshape(rank, n * k2)
    u, v = to_layer_factors(left, right, torch.Size((n, m, k1, k2)))
    for r in range(rank):
        for into in range(m):
            for down in range(k1):
                assert u[r, into, down, 0] == left[into * k1 + down, r]
        for out in range(n):
            for across in range(k2):
                assert v[out, r, 0, across] == right[r, out * k2 + across]


def test_split_in_pufferfishs_form_makes_each_direction_a_kernel() -> None:
    n, m, k1, k2, rank = 2, 3, 4, 5, 6
    left = torch.arange(m * k1 * k2 * rank).reshape(m * k1 * k2, rank)
    right = torch.arange(rank * n).reshape(rank, n)
    u, v = to_layer_factors(left, right, torch.Size((n, m, k1, k2)))
    for r in range(rank):
        assert torch.equal(u[r].flatten(), left[:, r])
        assert torch.equal(v[:, r, 0, 0], right[r])


def test_strides_of_split_do_not_depend_on_those_of_the_factors() -> None:
    shape = torch.Size((8, 4, 3, 1))
    left, right = torch.randn(12, 2), torch.randn(2, 8)
    usual = to_layer_factors(left, right, shape)
    columns_first = to_layer_factors(left.T.contiguous().T, right.T.contiguous().T, shape)
    for one, other in zip(usual, columns_first, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
