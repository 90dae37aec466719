"""Each method of adapters is the published rule, by its formula; with one client at one rank all are plain LoRA."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedhm
from fedhm.adapters.packing import FOLDED
from fedhm.config.loading import parse
from fedhm.data.federation import from_arrays
from fedhm.networks.exchange import Tensors, exchanged_tensors, load
from fedhm.work.messages import Participant, Update
from made_adapters import DATA, RANKS, TEST, TRAIN, answers, output, settings, started
from tiny_transformers import needs_peft, tiny_bert

pytestmark = [pytest.mark.slow, needs_peft]


def product(tensors: Tensors, layer: str) -> Tensor:
    return tensors[f"{layer}.v"] @ tensors[f"{layer}.u"]


def best(matrix: Tensor, rank: int) -> Tensor:
    U, S, Vt = torch.linalg.svd(matrix)
    return (U[:, :rank] * S[:rank]) @ Vt[:rank]


@pytest.mark.parametrize("tier", ["full", "1/2", "1/4"])
def test_flexlora_sends_the_best_approximation_of_the_mean_of_products(tier: str) -> None:
    method, state, _ = started("lora", ranks=RANKS, aggregate="models", weighting="samples")
    updates = [replace(update, samples=5 * (number + 1)) for number, update in enumerate(answers(method, state, 3))]
    found = method.merge(state, updates, 1)
    layer = next(iter(method.base.shapes))
    mean = sum(u.samples / 30 * product(u.tensors, layer) for u in updates)
    torch.testing.assert_close(product(method.weights(found, tier), layer), best(mean, method.ranks[tier]))


def test_raflora_averages_each_part_of_the_factors_over_those_who_have_it() -> None:
    method, state, _ = started("lora", ranks=RANKS, aggregate="partitions", weighting="samples")
    updates = [replace(update, samples=5 * (number + 1)) for number, update in enumerate(answers(method, state, 6))]
    found = method.merge(state, updates, 1)
    layer, mean = next(iter(method.base.shapes)), torch.zeros(16, 16)
    for first, last in ((0, 1), (1, 2), (2, 4)):
        reach = [u for u in updates if method.ranks[u.tier] >= last]
        assert len(reach) == {1: 6, 2: 4, 4: 2}[last]
        for u in reach:
            share = u.samples / sum(each.samples for each in reach)
            mean += share * u.tensors[f"{layer}.v"][:, first:last] @ u.tensors[f"{layer}.u"][first:last]
    torch.testing.assert_close(product(method.weights(found, "full"), layer), best(mean, 4))


def test_hetlora_pads_with_zeros_weighs_by_norms_and_truncates() -> None:
    method, state, _ = started("hetlora", ranks=RANKS)
    updates = answers(method, state, 3)
    found = method.merge(state, updates, 1)
    for layer in method.base.shapes:
        norms = [product(u.tensors, layer).norm().item() for u in updates]
        factors = [u.tensors[f"{layer}.u"] for u in updates]
        padded = [torch.cat([a, torch.zeros(4 - len(a), 16)]) for a in factors]
        expected = sum(norm * each for norm, each in zip(norms, padded, strict=True)) / sum(norms)
        torch.testing.assert_close(found.weights[f"{layer}.u"], expected)
    heads = [u.tensors["classifier.weight"] for u in updates]
    torch.testing.assert_close(found.weights["classifier.weight"], sum(heads) / 3)
    sent = method.weights(found, "1/4")
    assert torch.equal(sent[f"{layer}.u"], found.weights[f"{layer}.u"][:1])
    assert torch.equal(sent[f"{layer}.v"], found.weights[f"{layer}.v"][:, :1])


def test_hetlora_sends_less_to_a_client_that_has_pruned_its_rank() -> None:
    method, state, _ = started("hetlora", ranks=RANKS, prune=0.5)
    updates = answers(method, state, 2)
    tails = {n: t.clone() for n, t in updates[0].tensors.items()}
    for layer in method.base.shapes:
        tails[f"{layer}.u"][2:], tails[f"{layer}.v"][:, 2:] = 0, 0
    found = method.merge(state, [replace(updates[0], tensors=tails), updates[1]], 1)
    assert found.ranks == {0: 2, 1: 2}  # of 4 and 2: the second has pruned nothing
    asked = [Participant(0, "full"), Participant(1, "1/2"), Participant(5, "full"), Participant(0, "1/4")]
    tasks = list(method.tasks(found, asked, 2))
    assert [len(task.tensors[f"{layer}.u"]) for task in tasks] == [2, 2, 4, 1]
    assert [task.options.kept_rank for task in tasks] == [1, 1, 2, 1]


@pytest.mark.parametrize(("penalty", "left"), [(0.0, 4), (2.0, 2)])
def test_a_client_gives_up_directions_that_have_become_smaller(penalty: float, left: int) -> None:
    own = {"name": "hetlora", "prune": 0.5, "penalty": penalty}
    asked = settings(own, train={**TRAIN, "optimizer": "sgd", "lr": 0.01, "weight_decay": 0.0})
    asked["federation"] |= {"clients": 3}
    experiment = fedhm.assemble(tiny_bert(), from_arrays(DATA, TEST), parse(asked, "test"))
    method, start = experiment.method, experiment.method.start(exchanged_tensors(tiny_bert()))
    state = replace(start, weights={n: t + 0.1 if n.endswith(".v") else t for n, t in start.weights.items()})
    (reply,) = experiment.engine.run(list(method.tasks(state, [Participant(0, "full")], 1)))
    assert isinstance(reply, Update)
    layer = next(iter(method.base.shapes))
    assert reply.tensors[f"{layer}.u"].any(1).tolist() == [True] * left + [False] * (4 - left)
    assert method.merge(state, [reply], 1).ranks == {0: left}


def test_flora_adds_the_stacked_adapters_to_the_base() -> None:
    method, state, weights = started("flora", ranks=RANKS, weighting="samples")
    updates = [replace(update, samples=5 * (number + 1)) for number, update in enumerate(answers(method, state, 3))]
    found = method.merge(state, updates, 1)
    layer = next(iter(method.base.shapes))
    stacked_b = torch.cat([u.samples / 30 * u.tensors[f"{layer}.v"] for u in updates], 1)
    stacked_a = torch.cat([u.tensors[f"{layer}.u"] for u in updates])
    assert torch.equal(found.added[f"{layer}.u"], stacked_a)
    torch.testing.assert_close(found.added[f"{layer}.v"], stacked_b)
    network = load(method.network(method.spec("1/4")), method.weights(found, "1/4"))
    folded = dict(network.named_parameters())[f"base_model.model.{layer}.base_layer.weight"]
    torch.testing.assert_close(folded.data, weights[f"{layer}.weight"] + stacked_b @ stacked_a)
    with pytest.raises(fedhm.FedhmError, match="in the base itself"):
        fedhm.Result([], {"full": network}, {}).save_adapter("full", "out")


def test_flora_sends_the_stack_or_its_sum_whichever_has_fewer_numbers() -> None:
    """Of 16 × 16, factors of rank 7 are the smaller ones, and those of rank 14 are not."""
    method, state, weights = started("flora", ranks=RANKS)
    layer, added = next(iter(method.base.shapes)), torch.zeros(16, 16)
    for round_number, expected in ((1, 7 * 32), (2, 256), (3, 256)):
        updates = answers(method, state, 3, seed=round_number)
        state = method.merge(state, updates, round_number)
        added += sum(u.tensors[f"{layer}.v"] @ u.tensors[f"{layer}.u"] for u in updates) / 3
        (task,) = method.tasks(state, [Participant(0, "1/4")], round_number + 1)
        downloaded = {name: t for name, t in task.tensors.items() if name.startswith(f"{FOLDED}{layer}.")}
        assert sum(tensor.numel() for tensor in downloaded.values()) == expected
        network = load(method.network(task.network), task.tensors)
        folded = dict(network.named_parameters())[f"base_model.model.{layer}.base_layer.weight"]
        torch.testing.assert_close(folded.data, weights[f"{layer}.weight"] + added)


def test_in_flora_the_stack_of_many_clients_is_their_sum() -> None:
    method, state, _ = started("flora", ranks=RANKS)
    updates, layer = answers(method, state, 9), next(iter(method.base.shapes))
    mean = sum(u.tensors[f"{layer}.v"] @ u.tensors[f"{layer}.u"] for u in updates) / 9
    torch.testing.assert_close(method.merge(state, updates, 1).added[layer], mean)


def test_flora_goes_on_from_a_sum_that_an_earlier_version_left_dense() -> None:
    method, state, _ = started("flora", ranks=RANKS)
    updates, before = answers(method, state, 3), torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    found = method.merge(replace(state, added=dict.fromkeys(method.base.shapes, before), round=1), updates, 2)
    for layer in method.base.shapes:
        torch.testing.assert_close(found.added[layer], before + sum(product(u.tensors, layer) for u in updates) / 3)


def test_in_flora_every_client_begins_with_an_a_of_its_own() -> None:
    method, state, _ = started("flora", ranks=RANKS)
    asked = [Participant(0, "full"), Participant(1, "full")]
    first, second = (task.tensors for task in method.tasks(state, asked, 1))
    layer = next(iter(method.base.shapes))
    assert not torch.equal(first[f"{layer}.u"], second[f"{layer}.u"])
    assert not first[f"{layer}.v"].any()
    assert not second[f"{layer}.v"].any()


def test_ffa_lora_averages_b_alone_and_all_have_one_a() -> None:
    method, state, _ = started("ffalora", rank=2)
    assert not any(name.endswith(".u") for name in state.weights)
    updates = answers(method, state, 3)
    found = method.merge(state, updates, 1)
    layer = next(iter(method.base.shapes))
    networks = [load(method.network(method.spec("r2")), u.tensors) for u in updates] + [
        load(method.network(method.spec("r2")), found.weights)
    ]
    products = [n.get_submodule(f"base_model.model.{layer}").get_delta_weight("default") for n in networks]
    torch.testing.assert_close(products[3], (products[0] + products[1] + products[2]) / 3)  # no cross terms
    trained = [name for name, p in networks[0].named_parameters() if p.requires_grad]
    assert trained
    assert not any("lora_A" in name for name in trained)


@pytest.mark.parametrize("share_head", [False, True])
def test_fedsa_shares_a_and_clients_keep_the_rest(share_head: bool) -> None:
    own = {"name": "fedsa", "rank": 2, "share_head": share_head}
    run = fedhm.run(tiny_bert(), DATA, TEST, settings() | {"method": own})
    assert run.records[-1].traffic["r2"].answers == 3
    method, state, _ = started(**own)
    updates = answers(method, state, 3)
    found = method.merge(state, updates, 1)
    layer = next(iter(method.base.shapes))
    torch.testing.assert_close(found.weights[f"{layer}.a"], sum(u.tensors[f"{layer}.a"] for u in updates) / 3)
    tasks = list(method.tasks(found, [Participant(1, "r2"), Participant(7, "r2")], 2))
    assert torch.equal(tasks[0].kept[f"{layer}.b"], updates[1].kept[f"{layer}.b"])
    assert not tasks[1].kept[f"{layer}.b"].any()
    assert ("classifier.weight" in tasks[0].tensors) == share_head
    assert ("classifier.weight" in tasks[0].kept) != share_head


def merged_by(name: str, own: dict[str, Any], change: Any = lambda updates: updates) -> Tensor:
    method, state, _ = started(name, **own)
    merged = method.merge(state, change(answers(method, state, 1)), 1)
    return output(load(method.network(method.spec(method.tiers[0])), method.weights(merged, method.tiers[0])))


@pytest.mark.parametrize("aggregate", ["models", "updates", "bands", "partitions"])
def test_with_one_client_at_one_rank_lora_is_plain(aggregate: str) -> None:
    plain = merged_by("homolora", {"rank": 3})
    torch.testing.assert_close(merged_by("lora", {"ranks": [3], "aggregate": aggregate}), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own", [{}, {"sparsity_weights": False}, {"prune": 0.5}])
def test_with_one_client_at_one_rank_hetlora_is_plain(own: dict[str, Any]) -> None:
    plain = merged_by("homolora", {"rank": 3})
    torch.testing.assert_close(merged_by("hetlora", {"ranks": [3], **own}), plain, rtol=1e-4, atol=1e-5)


def test_at_one_rank_hetlora_without_sparsity_weights_is_homogeneous() -> None:
    found = []
    for name, own in (("homolora", {"rank": 3}), ("hetlora", {"ranks": [3], "sparsity_weights": False})):
        method, state, _ = started(name, **own)
        found.append(method.merge(state, answers(method, state, 4), 1).weights)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@pytest.mark.parametrize("name", ["flora", "lora"])
def test_folding_with_one_client_is_plain_lora(name: str) -> None:
    own: dict[str, Any] = {"ranks": [3]} | ({"fold": True, "fold_rank": 6} if name == "lora" else {})
    method, state, _ = started(name, **own)
    (update,) = answers(method, state, 1)
    merged = method.merge(state, [update], 1)
    plain, before, _ = started("homolora", rank=3)
    expected = output(load(plain.network(plain.spec("r3")), update.tensors))
    torch.testing.assert_close(
        output(load(method.network(method.spec("full")), method.weights(merged, "full"))),
        expected,
        rtol=1e-4,
        atol=1e-5,
    )
    (task,) = method.tasks(merged, [Participant(0, "full")], 2)
    trained = load(method.network(task.network), task.tensors)  # the adapter begins at zero on top of the whole
    torch.testing.assert_close(output(trained), expected, rtol=1e-4, atol=1e-5)
    assert before.weights.keys() == update.tensors.keys()


@pytest.mark.parametrize("name", ["lora", "hetlora", "flora"])
def test_a_round_does_not_depend_on_where_an_update_comes_from(name: str) -> None:
    """Updates are merged in the order of their tasks; but even another order is the same but for rounding."""
    method, state, _ = started(name, ranks=RANKS)
    updates: list[Update] = answers(method, state, 5)
    one, other = (method.merge(state, given, 1) for given in (updates, updates[::-1]))
    both = [output(load(method.network(method.spec("full")), method.weights(each, "full"))) for each in (one, other)]
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)
