"""Partitions are disjoint covers of the samples, whatever the labels; FedDF's leaves out a few samples."""

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from fedhm.config.schema import DataConfig
from fedhm.data.partition import PARTITIONS, Partition, _feddf_group, by_tier, dirichlet_equal, dirichlet_feddf
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


@pytest.mark.parametrize("name", [name for name in PARTITIONS if name != "dirichlet-feddf"])
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


@settings(deadline=None, max_examples=60)
@given(
    labels=st.lists(st.integers(0, 6), min_size=40, max_size=300),
    clients=st.integers(1, 33),
    alpha=st.sampled_from([0.5, 2.0, 100.0]),
    seed=st.integers(0, 5),
)
def test_feddfs_partition_has_equal_sizes_and_no_sample_twice(
    labels: list[int], clients: int, alpha: float, seed: int
) -> None:
    try:
        parts = dealt("dirichlet-feddf", labels, clients, alpha, seed)
    except FedhmError:
        reject()
    dealt_out = np.concatenate(parts).tolist()
    assert [len(part) for part in parts] == [len(labels) // clients] * clients
    assert len(set(dealt_out)) == len(dealt_out)
    assert set(dealt_out) <= set(range(len(labels)))
    assert len(labels) - len(dealt_out) < clients


@settings(deadline=None, max_examples=30)
@given(clients=st.integers(1, 10), alpha=st.sampled_from([0.3, 1.0, 50.0]), seed=st.integers(0, 20))
def test_a_group_of_feddf_splits_all_its_samples_and_nobody_is_below_half_a_share(
    clients: int, alpha: float, seed: int
) -> None:
    labels = np.repeat(np.arange(10), 60)
    group = np.arange(600)[::2]
    parts = _feddf_group(labels, group, clients, alpha, np.random.default_rng(seed))
    assert sorted(np.concatenate(parts).tolist()) == group.tolist()
    assert min(map(len, parts)) >= 300 // clients // 2
    # a client with an equal share gets no further label, so at most one label of 30 samples takes it beyond the share
    assert max(map(len, parts)) <= 300 / clients + 30


def test_alpha_skews_the_labels_of_feddfs_partition_within_groups_of_ten() -> None:
    labels = np.repeat(np.arange(10), 500)

    def counts(alpha: float, seed: int = 0) -> np.ndarray:
        parts = dirichlet_feddf(labels, 20, alpha, np.random.default_rng(seed))
        return np.array([np.bincount(labels[part], minlength=10) for part in parts])

    assert counts(1000.0).max() / 250 < 0.15
    assert 0.25 < counts(0.5).max(1).mean() / 250 < 0.6
    # each group of ten has a random half of every label
    for group in (counts(0.5)[:10], counts(0.5)[10:]):
        assert np.abs(group.sum(0) - 250).max() < 60
    assert np.array_equal(counts(0.5), counts(0.5))
    assert not np.array_equal(counts(0.5), counts(0.5, seed=1))


def test_feddfs_partition_is_refused_where_it_would_draw_forever() -> None:
    sentence = r"'dirichlet-feddf' gives every client half .*data\.alpha = 0\.05 .*choose a larger alpha"
    with pytest.raises(FedhmError, match=sentence):
        dirichlet_feddf(np.repeat(np.arange(2), 100), 10, 0.05, np.random.default_rng(0))


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
