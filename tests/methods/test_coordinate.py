"""Coordinate-wise rules: the trimmed mean and the median of every number, over what clients of a tier sent."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.methods.fedhm import FedHM, FedHMConfig
from fedhm.methods.means import CoordinateMean, Rule, robust_mean
from fedhm.methods.method import Setup
from fedhm.networks.exchange import exchanged_tensors
from fedhm.work.messages import Participant


def plain(values: list[float], rule: Rule, trim: float) -> float:
    """Return the rule over one coordinate, by the book."""
    ordered, count = sorted(values), len(values)
    if count < 3:
        return sum(values) / count
    if rule == "median":
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    ends = max(1, int(trim * count))
    return sum(ordered[ends : count - ends]) / (count - 2 * ends)


RULES = st.sampled_from(["trimmed-mean", "median"])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 12), RULES, st.floats(0, 0.49))
def test_every_number_is_that_of_the_rule(seed: int, count: int, rule: Rule, trim: float) -> None:
    stacked = torch.randn(count, 3, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = robust_mean(stacked, rule, trim)
    for place in range(6):
        expected = plain(stacked.flatten(1)[:, place].tolist(), rule, trim)
        assert found.flatten()[place].item() == pytest.approx(expected)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), RULES)
def test_products_of_factors_are_recovered_first(seed: int, rule: Rule) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = {"w": torch.zeros(4, 3, dtype=torch.float64)}
    mean = CoordinateMean(old, rule, 0.2)
    dense: list[Tensor] = []
    for _ in range(5):
        left, right = (torch.randn(*shape, generator=generator).double() for shape in ((3, 2), (2, 4)))
        mean.add_product("w", left, right, 2.0)
        dense.append((left @ right).T)
    torch.testing.assert_close(mean.result()["w"], robust_mean(torch.stack(dense), rule, 0.2))


def test_two_tiers_weigh_as_much_as_their_clients() -> None:
    old = {"w": torch.zeros(2)}
    whole, tiers = CoordinateMean(old, "median", 0.2), [CoordinateMean(old, "median", 0.2) for _ in range(2)]
    for value in (1.0, 2.0, 1000.0):
        tiers[0].add("w", torch.full((2,), value), 1.0)
    tiers[1].add("w", torch.full((2,), 6.0), 1.0)
    for tier in tiers:
        whole.add_mean(tier)
    assert whole.result()["w"].tolist() == pytest.approx([(3 * 2.0 + 6.0) / 4] * 2)


def test_a_row_is_that_of_those_who_trained_it() -> None:
    mean = CoordinateMean({"w": torch.full((3, 1), 9.0)}, "median", 0.2)
    for value, rows in ((1.0, [1, 0, 0]), (2.0, [1, 1, 0]), (50.0, [1, 0, 0])):
        mean.add("w", torch.full((3, 1), value), 1.0, torch.tensor(rows, dtype=torch.float64))
    assert mean.result()["w"].flatten().tolist() == [2.0, 2.0, 9.0]


@pytest.mark.parametrize("method", ["fedhm", "fedavg"])
@pytest.mark.parametrize("aggregate", ["bands", "updates", "models"])
@pytest.mark.parametrize("rule", ["trimmed-mean", "median"])
def test_clients_that_all_agree_are_merged_as_by_the_mean(
    federation: Federation, method: str, aggregate: str, rule: str
) -> None:
    """Of clients that return the same, any rule is the mean: by every way in which a method may average."""
    own = {"aggregate": aggregate} if method == "fedhm" else {}
    merged = []
    for robust in ("none", rule):
        config = small_config(method={"name": method, **own}, server={"robust": robust}, train={"nested": 0.0})
        experiment = assemble(small_model(), federation, config)
        state = experiment.method.start(experiment.initial)
        chosen = next(experiment._sample(1))
        updates = []
        for task in experiment.method.tasks(state, chosen, 1):
            tensors = {name: tensor + 0.01 for name, tensor in task.tensors.items()}
            updates.append(_update(task, tensors))
        merged.append(experiment.method.merge(state, iter(updates), 1).weights)
    for name, tensor in merged[0].items():
        torch.testing.assert_close(merged[1][name], tensor, rtol=1e-4, atol=1e-5)


def _update(task, tensors):  # type: ignore[no-untyped-def]
    from fedhm.work.messages import Update

    return Update("train", 1, task.client, task.tier, task.network, tensors, 5, (0, 1, 2, 3), 0.0)


@pytest.mark.parametrize("rule", ["trimmed-mean", "median"])
def test_layers_that_are_merged_side_by_side_are_settled_once(rule: Rule) -> None:
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(8)))
    setup = Setup(make_mean=partial(CoordinateMean, rule=rule, trim=0.2))
    method = FedHM(model, FedHMConfig(tiers=(1, 1 / 3, 1 / 4)), setup)
    state = method.start(exchanged_tensors(model))
    clients = [Participant(number, tier) for number, tier in enumerate(list(method.tiers) * 3)]
    generator = torch.Generator().manual_seed(0)
    updates = []
    for task in method.tasks(state, clients, 1):
        moved = {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in task.tensors.items()}
        updates.append(_update(task, moved))
    threads = torch.get_num_threads()
    try:
        merged = []
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            merged.append(method.merge(state, iter(updates), 1).weights)
    finally:
        torch.set_num_threads(threads)
    for name, tensor in merged[0].items():
        assert torch.equal(merged[1][name], tensor)
        assert torch.equal(merged[2][name], tensor)


def test_a_method_that_averages_parts_of_models_refuses(federation: Federation) -> None:
    config = small_config(method={"name": "heterofl"}, server={"robust": "median"})
    with pytest.raises(FedhmError, match="for methods that average whole models, and heterofl does not: set it to"):
        assemble(small_model(), federation, config)
