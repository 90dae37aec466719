"""Partitions are disjoint covers of the samples, whatever the labels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhm.data.partition import PARTITIONS, dirichlet_equal

cases = {
    "labels": st.lists(st.integers(0, 6), min_size=12, max_size=150),
    "clients": st.integers(1, 12),
    "alpha": st.sampled_from([1e-3, 0.1, 0.5, 10.0]),
    "seed": st.integers(0, 5),
}


@pytest.mark.parametrize("name", PARTITIONS)
@settings(deadline=None, max_examples=60)
@given(**cases)
def test_every_sample_goes_to_one_client(name: str, labels: list[int], clients: int, alpha: float, seed: int) -> None:
    parts = PARTITIONS[name](np.array(labels), clients, alpha, np.random.default_rng(seed))
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@pytest.mark.parametrize("name", ["iid", "dirichlet"])
@settings(deadline=None, max_examples=60)
@given(**cases)
def test_equal_partitions_have_equal_sizes(name: str, labels: list[int], clients: int, alpha: float, seed: int) -> None:
    parts = PARTITIONS[name](np.array(labels), clients, alpha, np.random.default_rng(seed))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_a_small_alpha_skews_labels_and_a_large_one_does_not() -> None:
    labels = np.repeat(np.arange(10), 500)

    def largest_share(alpha: float) -> float:
        parts = dirichlet_equal(labels, 20, alpha, np.random.default_rng(0))
        return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))

    # the expected largest of 10 shares from Dirichlet(α): about 0.1 for large α, towards 1 for small
    assert largest_share(100.0) < 0.15
    assert 0.25 < largest_share(0.5) < 0.5
    assert largest_share(0.01) > 0.75


def test_the_same_generator_gives_the_same_partition() -> None:
    labels = np.arange(100) % 5
    first, second = (dirichlet_equal(labels, 4, 0.5, np.random.default_rng(3)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
