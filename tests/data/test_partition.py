"""Partitions are disjoint covers of the samples, whatever the labels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhm.config.schema import DataConfig
from fedhm.data.partition import PARTITIONS, Partition, by_tier, dirichlet_equal
from fedhm.errors import FedhmError

cases = {
    "labels": st.lists(st.integers(0, 6), min_size=12, max_size=150),
    "clients": st.integers(1, 12),
    "alpha": st.sampled_from([1e-3, 0.1, 0.5, 10.0]),
    "seed": st.integers(0, 5),
}


def dealt(name: str, labels: list[int], clients: int, alpha: float, seed: int) -> Partition:
    config = DataConfig(alpha=alpha, by_tier_share=min(1.0, alpha), by_tier_levels=1 + max(labels) // 2)
    return PARTITIONS[name](np.array(labels), clients, config, np.random.default_rng(seed))


@pytest.mark.parametrize("name", PARTITIONS)
@settings(deadline=None, max_examples=60)
@given(**cases)
def test_every_sample_goes_to_one_client(name: str, labels: list[int], clients: int, alpha: float, seed: int) -> None:
    parts = dealt(name, labels, clients, alpha, seed)
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@pytest.mark.parametrize("name", ["iid", "dirichlet", "by-tier"])
@settings(deadline=None, max_examples=60)
@given(**cases)
def test_equal_partitions_have_equal_sizes(name: str, labels: list[int], clients: int, alpha: float, seed: int) -> None:
    parts = dealt(name, labels, clients, alpha, seed)
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


def share_of_own_labels(labels: np.ndarray, parts: Partition, levels: int) -> np.ndarray:
    """For each level and label: which share of the label's samples the level's clients hold."""
    held = [np.concatenate(parts[level::levels]) for level in range(levels)]
    counts = np.array([np.bincount(labels[indices], minlength=labels.max() + 1) for indices in held])
    return counts / np.bincount(labels)


def test_each_level_holds_most_of_its_own_labels() -> None:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(20), 100))
    parts = by_tier(labels, 20, 4, 0.8, np.random.default_rng(0))
    shares = share_of_own_labels(labels, parts, 4)
    # 0.8 of a label is its level's, of the rest everybody has the same share by chance
    assert np.bincount(shares.argmax(0)).tolist() == [5] * 4
    assert shares.max(0).mean() == pytest.approx(0.8 + 0.2 / 4, abs=0.03)
    assert np.sort(shares, axis=0)[:-1].mean() == pytest.approx(0.2 / 4, abs=0.01)
    own = shares.argmax(0)
    for client, part in enumerate(parts):
        of_its_level = (own[labels[part]] == client % 4).mean()
        assert of_its_level >= 0.8


def test_labels_that_do_not_divide_by_the_levels_leave_nobody_without_one() -> None:
    labels = np.repeat(np.arange(10), 1000)
    parts = by_tier(labels, 20, 4, 0.8, np.random.default_rng(0))
    shares = share_of_own_labels(labels, parts, 4)
    assert sorted(np.bincount(shares.argmax(0)).tolist()) == [2, 2, 3, 3]
    assert shares.min() > 0
    assert shares.max(0).min() > 0.6


def test_a_share_of_zero_is_no_rule_and_one_is_strict() -> None:
    labels = np.repeat(np.arange(8), 50)
    even = share_of_own_labels(labels, by_tier(labels, 8, 4, 0.0, np.random.default_rng(0)), 4)
    assert even.max() < 0.5
    strict = share_of_own_labels(labels, by_tier(labels, 8, 4, 1.0, np.random.default_rng(0)), 4)
    assert sorted(np.unique(strict).tolist()) == [0, 1]


def test_another_seed_gives_a_level_other_labels() -> None:
    labels = np.arange(200) % 10
    first, again, other = (by_tier(labels, 8, 4, 0.8, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(
        share_of_own_labels(labels, first, 4).argmax(0), share_of_own_labels(labels, other, 4).argmax(0)
    )


def test_more_levels_than_labels_are_one_sentence() -> None:
    with pytest.raises(FedhmError, match=r"data\.by_tier_levels = 4, but 3 labels are too few for so many levels"):
        by_tier(np.arange(30) % 3, 5, 4, 0.8, np.random.default_rng(0))
