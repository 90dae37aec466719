"""The mean in the span of the factors is the mean of the recovered matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedhm.lowrank.average import (
    LENGTH,
    AdapterSum,
    Aggregate,
    RankLevel,
    initial_adapter,
    mean_by_bands,
    merge_adapters,
)
from fedhm.lowrank.svd import Factors

RANKS = (6, 3, 1)


def draw(m: int, n: int, clients: int, seed: int) -> tuple[Factors, list[tuple[int, Tensor, Tensor]]]:
    """Return what the server has, and for each client its rank and factors, near those that it was sent."""
    generator = torch.Generator().manual_seed(seed)
    U, S, Vt = torch.linalg.svd(torch.randn(m, n, generator=generator), full_matrices=False)
    old = Factors(U[:, :6] * LENGTH, S[:6, None] * Vt[:6] / LENGTH, S)
    found = []
    for client in range(clients):
        rank = RANKS[client % 3]
        left, right = old.prefix(rank)
        noise = torch.randn(m, rank, generator=generator), torch.randn(rank, n, generator=generator)
        found.append((rank, left + 0.1 * noise[0], right + 0.1 * noise[1]))
    return old, found


def plain(old: Factors, clients: list[tuple[int, Tensor, Tensor]], aggregate: Aggregate) -> Tensor:
    """Return the mean by whole matrices."""
    weights = [1.0 + number for number in range(len(clients))]
    if aggregate == "models":
        return sum(w * left @ right for w, (_, left, right) in zip(weights, clients, strict=True)) / sum(weights)
    levels = []
    for rank in RANKS:
        of_rank = [(w, a @ b) for w, (r, a, b) in zip(weights, clients, strict=True) if r == rank]
        if of_rank:
            sent = old.left[:, :rank] @ old.right[:rank]
            levels.append(RankLevel(rank, sum(w * (m - sent) for w, m in of_rank), sum(w for w, _ in of_rank)))
    if aggregate == "bands":
        return old.left @ old.right + mean_by_bands(levels, old)
    return old.left @ old.right + sum(level.total for level in levels) / sum(weights)


@pytest.mark.parametrize("aggregate", ["models", "updates", "bands"])
@settings(deadline=None, max_examples=10)
@given(clients=st.integers(1, 9), seed=st.integers(0, 5), sides=st.sampled_from([(60, 44), (30, 80), (9, 12)]))
def test_it_is_the_best_approximation_of_the_recovered_mean(
    aggregate: Aggregate, clients: int, seed: int, sides: tuple[int, int]
) -> None:
    old, given_ = draw(*sides, clients, seed)
    levels = {rank: AdapterSum(rank, sides, rank) for rank in RANKS}
    for number, (rank, left, right) in enumerate(given_):
        levels[rank].add(left, right, 1.0 + number)
    found = merge_adapters(list(levels.values()), old, aggregate)
    expected = plain(old, given_, aggregate)
    U, S, Vt = torch.linalg.svd(expected.double(), full_matrices=False)
    best = (U[:, :6] * S[:6]) @ Vt[:6]
    torch.testing.assert_close((found.left @ found.right).double(), best, rtol=1e-3, atol=1e-3)
    shown = found.spectrum[: min(len(S), len(found.spectrum))].double()
    torch.testing.assert_close(shown, S[: len(shown)], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.left.T @ found.left, LENGTH**2 * torch.eye(6), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("speed", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("sides", [(60, 44), (9, 12)])
def test_at_a_speed_bands_lie_between_the_means_over_everybody_and_over_those_who_reach_them(
    speed: float, sides: tuple[int, int]
) -> None:
    old, given_ = draw(*sides, 4, 0)
    levels = {rank: AdapterSum(rank, sides, rank) for rank in RANKS}
    for number, (rank, left, right) in enumerate(given_):
        levels[rank].add(left, right, 1.0 + number)
    found = merge_adapters(list(levels.values()), old, "bands", speed)
    expected = (1 - speed) * plain(old, given_, "updates") + speed * plain(old, given_, "bands")
    U, S, Vt = torch.linalg.svd(expected.double(), full_matrices=False)
    torch.testing.assert_close((found.left @ found.right).double(), (U[:, :6] * S[:6]) @ Vt[:6], rtol=1e-3, atol=1e-3)


def test_memory_does_not_grow_with_the_clients() -> None:
    level = AdapterSum(4, (20, 30), 4)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        level.add(torch.randn(20, 4, generator=generator), torch.randn(4, 30, generator=generator), 1.0)
        assert 2 * level.columns <= 20
    assert level.whole is not None


def test_what_nobody_answered_stays_and_what_begins_is_zero() -> None:
    old = initial_adapter((8, 5), 3, torch.Generator().manual_seed(0))
    assert not (old.left @ old.right).any()
    assert merge_adapters([], old, "bands") is old
