"""Inner products of recovered changes, across ranks, without recovering any."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedhm.lowrank.delta import factorized_delta
from fedhm.lowrank.svd import Form, roll, to_layer_factors, unroll
from fedhm.server.filters.agreement import gram_matrix, recovered_delta

SHAPES = {"conv": torch.Size((6, 4, 3, 3)), "line": torch.Size((5, 5))}


def network(seed: int, rank: int | None, form: Form) -> dict[str, Tensor]:
    """One model's layers, factorized at a rank, or dense without one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    found = {"line.bias": draw(5)}
    for layer, shape in SHAPES.items():
        rows, columns = unroll(torch.zeros(shape), form).shape
        if rank is None:
            found[f"{layer}.weight"] = draw(*shape)
        else:
            found[f"{layer}.u"], found[f"{layer}.v"] = to_layer_factors(draw(rows, rank), draw(rank, columns), shape)
    return found


def dense(tensors: dict[str, Tensor]) -> Tensor:
    """The whole model as one vector."""
    parts = [tensors["line.bias"].double()]
    for layer, shape in SHAPES.items():
        if f"{layer}.weight" in tensors:
            parts.append(tensors[f"{layer}.weight"].double())
        else:
            u, v = tensors[f"{layer}.u"].double(), tensors[f"{layer}.v"].double()
            rank = len(u)
            left = u.reshape(rank, -1).T
            right = v.T if v.ndim == 2 else v.permute(1, 0, 2, 3).reshape(rank, -1)
            parts.append(roll(left @ right, shape))
    return torch.cat([part.flatten() for part in parts])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from(["spatial", "pufferfish"]))
def test_they_are_those_of_the_dense_changes(seed: int, form: Form) -> None:
    changes, vectors = [], []
    for number, rank in enumerate((None, 2, 1, 3, None)):
        sent, returned = network(seed + 2 * number, rank, form), network(seed + 2 * number + 1, rank, form)
        layers = () if rank is None else tuple(SHAPES)
        changes.append(recovered_delta(factorized_delta(returned, sent, layers), layers))
        vectors.append(dense(returned) - dense(sent))
    stacked = torch.stack(vectors)
    torch.testing.assert_close(gram_matrix(changes), stacked @ stacked.T, rtol=1e-5, atol=1e-3)


def test_a_diagonal_is_the_squared_norm() -> None:
    sent, returned = network(0, 2, "spatial"), network(1, 2, "spatial")
    whole = factorized_delta(returned, sent, tuple(SHAPES))
    assert gram_matrix([recovered_delta(whole, tuple(SHAPES))]).item() == pytest.approx(whole.norm**2, rel=1e-9)
