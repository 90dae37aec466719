import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhm.lowrank.unroll import join, roll, split, unroll, unrolled_shape

sizes = st.integers(1, 5)
shapes = st.one_of(st.tuples(sizes, sizes), st.tuples(sizes, sizes, sizes, sizes)).map(torch.Size)


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


def test_linear_unrolls_to_its_transpose() -> None:
    weight = torch.arange(6).reshape(2, 3)
    assert unroll(weight).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_linear_is_the_convolution_of_size_one() -> None:
    weight = torch.arange(6).reshape(2, 3)
    assert torch.equal(unroll(weight), unroll(weight[:, :, None, None]))


@settings(deadline=None, max_examples=50)
@given(shapes)
def test_roll_is_the_inverse_of_unroll(shape: torch.Size) -> None:
    weight = torch.arange(shape.numel()).reshape(shape)
    matrix = unroll(weight)
    assert tuple(matrix.shape) == unrolled_shape(shape)
    assert torch.equal(roll(matrix, shape), weight)
    assert torch.equal(unroll(roll(matrix, shape)), matrix)


@settings(deadline=None, max_examples=50)
@given(shapes, sizes)
def test_join_is_the_inverse_of_split(shape: torch.Size, rank: int) -> None:
    rows, columns = unrolled_shape(shape)
    left = torch.arange(rows * rank).reshape(rows, rank)
    right = torch.arange(rank * columns).reshape(rank, columns) + 1000
    u, v = split(left, right, shape)
    n, m, *kernel = shape
    if kernel:
        assert u.shape == (rank, m, kernel[0], 1)
        assert v.shape == (n, rank, 1, kernel[1])
    else:
        assert u.shape == (rank, m)
        assert v.shape == (n, rank)
    assert u.is_contiguous()
    assert v.is_contiguous()
    joined = join(u, v)
    assert torch.equal(joined[0], left)
    assert torch.equal(joined[1], right)
    again = split(*joined, shape)
    assert torch.equal(again[0], u)
    assert torch.equal(again[1], v)


def test_split_puts_each_direction_in_one_channel() -> None:
    n, m, k1, k2, rank = 2, 3, 4, 5, 6
    left = torch.arange(m * k1 * rank).reshape(m * k1, rank)
    right = torch.arange(rank * n * k2).reshape(rank, n * k2)
    u, v = split(left, right, torch.Size((n, m, k1, k2)))
    for r in range(rank):
        for into in range(m):
            for down in range(k1):
                assert u[r, into, down, 0] == left[into * k1 + down, r]
        for out in range(n):
            for across in range(k2):
                assert v[out, r, 0, across] == right[r, out * k2 + across]


def test_strides_of_split_do_not_depend_on_those_of_the_factors() -> None:
    shape = torch.Size((8, 4, 3, 1))
    left, right = torch.randn(12, 2), torch.randn(2, 8)
    usual = split(left, right, shape)
    columns_first = split(left.T.contiguous().T, right.T.contiguous().T, shape)
    for one, other in zip(usual, columns_first, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
