"""The loop: the same results whatever the order of arrival, honest records, and bad updates kept out."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.data.federation import Federation
from fedhm.data.samples import Feed
from fedhm.errors import FedhmError
from fedhm.experiment import Experiment
from fedhm.networks.exchange import load
from fedhm.report.result import Result
from fedhm.server.collect import in_task_order
from fedhm.work.evaluate import evaluate
from fedhm.work.messages import Failure, Participant, Reply, Task, Update
from fedhm.work.statistics import pool


def same(first: Result, second: Result) -> bool:
    return all(
        torch.equal(tensor, second.networks[tier].state_dict()[name])
        for tier, network in first.networks.items()
        for name, tensor in network.state_dict().items()
    )


class Meddling:
    """The local engine, with replies changed or reordered on their way."""

    def __init__(self, experiment: Experiment) -> None:
        self._engine = experiment.engine

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        replies = list(self._engine.run(tasks))
        random.Random(0).shuffle(replies)
        for reply in replies:
            yield self.meddle(reply)

    def close(self) -> None:
        self._engine.close()

    def meddle(self, reply: Reply) -> Reply:
        return reply


def run(data: Federation, engine: type[Meddling] | None = None, /, **sections: dict[str, object]) -> Result:
    experiment = assemble(small_model(), data, small_config(**sections))
    if engine is not None:
        experiment.engine = engine(experiment)
    return experiment.run()


@pytest.mark.parametrize("aggregate", ["models", "updates", "bands"])
def test_arrival_order_does_not_matter(federation: Federation, aggregate: str) -> None:
    sections = {"method": {"aggregate": aggregate}, "federation": {"participation": 1.0}}
    assert same(run(federation, **sections), run(federation, Meddling, **sections))


def test_seeds_decide_everything(federation: Federation) -> None:
    torch.manual_seed(0)
    first = run(federation)
    torch.manual_seed(1)
    assert same(first, run(federation))
    other = assemble(small_model(), federation, small_config().model_copy(update={"seed": 1})).run()
    assert not same(first, other)


@pytest.mark.slow
def test_every_tier_learns(federation: Federation) -> None:
    for heterogeneity in ("fixed", "dynamic"):
        tiers: dict[str, object] = {"heterogeneity": heterogeneity}
        result = run(federation, train={"rounds": 8, "epochs": 3}, federation=tiers, evaluation={"every": 8})
        assert all(score.accuracy > 0.85 for score in result.metrics.values()), result.metrics


def test_records_tell_what_was_sent_computed_and_measured(federation: Federation) -> None:
    result = run(federation, evaluation={"every": 2}, train={"rounds": 3, "epochs": 2, "nested": 0})
    assert [bool(record.metrics) for record in result.records] == [False, True, True]
    for record in result.records:
        assert len(record.participants) == 4
        assert {p.tier for p in record.participants} == set(record.traffic)
        for tier, traffic in record.traffic.items():
            # static batch normalisation: 2 layers' running mean and variance stay at home
            on_wire = result.costs[tier].bytes - 4 * 2 * (8 + 16)
            assert traffic.down == traffic.up == traffic.clients * on_wire
            assert traffic.macs == traffic.clients * result.costs[tier].macs * 20 * 2
        assert all(0 < traffic.loss < 5 and traffic.answers == traffic.clients for traffic in record.traffic.values())
        beyond = {f"energy_beyond/{tier}" for tier in ("1/2", "1/4", "1/8")}
        kappas = {"kappa_uv", "kappa_sigma1", "kappa_sigma2"}
        assert set(record.diagnostics) == {*kappas, "exact_decompositions", *beyond}
        assert all(0 < record.diagnostics[name] < 1 for name in beyond)
        assert set(record.seconds) >= {"train", "merge"}
        assert (record.statistics.clients > 0) == bool(record.metrics)


def test_running_averages_are_used_until_statistics_are_gathered(federation: Federation) -> None:
    """At the switch: round `static_from` is evaluated with running averages, the next one with gathered statistics."""
    switch = 2
    config = small_config(
        evaluation={"static_from": switch}, train={"rounds": 4, "nested": 0}, federation={"participation": 1.0}
    )
    experiment = assemble(small_model(), federation, config)
    states, gathered = [], []
    merge, run_tasks = experiment.method.merge, experiment.engine.run

    def remember(state: Any, updates: Any, round_number: int) -> Any:
        states.append(merge(state, updates, round_number))
        return states[-1]

    class Watching:
        def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
            for reply in run_tasks(tasks):
                if isinstance(reply, Update) and reply.kind == "statistics":
                    gathered.append(reply)
                yield reply

        def close(self) -> None: ...

    experiment.method.merge = remember  # type: ignore[method-assign]
    experiment.engine = Watching()
    result = experiment.run()
    test = Feed(federation.test, federation.preprocessing)  # type: ignore[arg-type]
    for record, state in zip(result.records, states, strict=True):
        static = record.round > switch
        assert (record.statistics.clients, record.statistics.down > 0) == ((32, True) if static else (0, False))
        pooled = {
            tier: pool(u.tensors for u in gathered if u.round == record.round and u.network.tier == tier)
            for tier in result.costs
        }
        assert all(bool(found) == static for found in pooled.values())
        weights = {tier: experiment.method.weights(state, tier) for tier in result.costs}
        for tier, traffic in record.traffic.items():  # running averages travel as long as they are used
            at_home = 4 * 2 * (8 + 16) if static else 0
            assert traffic.down == traffic.up == traffic.clients * (result.costs[tier].bytes - at_home)
        for tier, own in weights.items():
            network = load(experiment.method.network(experiment.method.spec(tier)), {**own, **pooled[tier]})
            batch, objective = config.evaluation.batch, config.objective
            assert record.metrics[tier] == evaluate(network, test, batch, objective)
            if static:  # the weights of the round with running averages give other metrics
                stale = load(experiment.method.network(experiment.method.spec(tier)), own)
                assert record.metrics[tier] != evaluate(stale, test, batch, objective)
    never = run(federation, evaluation={"static_from": "never"})
    assert all(record.statistics.clients == 0 for record in never.records)


def test_clients_can_be_assigned_their_tiers(federation: Federation) -> None:
    assignment = ["1/8"] * 7 + ["full"]
    result = run(federation, federation={"assignment": assignment, "participation": 1.0})
    assert [p.tier for p in result.records[0].participants] == assignment
    with pytest.raises(FedhmError, match="names 2 tiers for 8 clients"):
        run(federation, federation={"assignment": ["full", "1/2"]})
    with pytest.raises(FedhmError, match="no tier '1/3'"):
        run(federation, federation={"assignment": ["1/3"] * 8})


def test_a_loss_that_became_nan_names_client_and_round(federation: Federation) -> None:
    with pytest.raises(FedhmError, match=r"client \d \(tier [\w/]+\) in round 1 cannot be used: its loss became NaN"):
        run(federation, train={"lr": 1e30})


class Hostile(Meddling):
    def meddle(self, reply: Reply) -> Reply:
        if isinstance(reply, Update) and reply.kind in ("train", "nested") and reply.client % 4 == 1:
            return replace(reply, tensors={n: t * float("nan") for n, t in reply.tensors.items()})
        if reply.client % 4 == 2:
            return Failure(reply.client, "it caught fire", reply.position)
        return reply


def test_bad_updates_cost_only_themselves(federation: Federation) -> None:
    sections = {"federation": {"participation": 1.0}, "train": {"on_bad_update": "drop", "rounds": 2}}
    result = run(federation, Hostile, **sections)
    reasons = {(entry["client"], entry["kind"]): entry["reason"] for entry in result.records[0].dropped}
    assert reasons[2, "nested"] == reasons[6, "statistics"] == "it caught fire"
    assert "NaN" in reasons[1, "nested"]
    assert (1, "statistics") not in reasons
    assert all(score.loss < 100 for score in result.metrics.values())
    with pytest.raises(FedhmError, match=r"client 1 .* round 1 cannot be used"):
        run(federation, Hostile, federation={"participation": 1.0})


class Dead(Meddling):
    def meddle(self, reply: Reply) -> Reply:
        return Failure(reply.client, "nobody there", reply.position)


def test_a_round_without_any_update_ends_the_run(federation: Federation) -> None:
    with pytest.raises(FedhmError, match=r"no client's update could be used in round 1.*nobody there"):
        run(federation, Dead, train={"on_bad_update": "drop"})


def test_a_client_whose_network_raises_is_named(federation: Federation) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.BatchNorm1d(24), nn.Linear(24, 24), nn.Linear(24, 4))
    lonely = [federation.clients[0].subset(torch.tensor([0])), *federation.clients[1:]]
    config = small_config(method={"name": "fedhm", "tiers": [1, "1/8"]}, federation={"participation": 1.0})
    with pytest.raises(FedhmError, match=r"client 0 .* in round 1 .*: Expected more than 1 value per channel"):
        assemble(model, replace(federation, clients=lonely), config).run()


def test_a_model_that_does_not_fit_the_data_is_refused_at_once(federation: Federation) -> None:
    for model, sentence in (
        (nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(128, 64), nn.Linear(64, 3)), "each of 4 classes"),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(128, 64), nn.Linear(64, 4)), "does not accept"),
        (small_model().double(), "does not accept the inputs, of shape"),
    ):
        with pytest.raises(FedhmError, match=sentence):
            assemble(model, federation, small_config())


def test_remote_clients_need_an_engine_and_give_the_same_numbers_through_it(federation: Federation) -> None:
    far = replace(federation, clients=[], remote=(20,) * 8)
    with pytest.raises(FedhmError, match="must be given an engine"):
        assemble(small_model(), far, small_config())
    near = assemble(small_model(), federation, small_config())
    result = assemble(small_model(), far, small_config(), engine=near.engine).run()
    assert same(result, near.run())


def test_the_number_of_threads_is_given_back(federation: Federation) -> None:
    torch.set_num_threads(1)
    run(federation, train={"rounds": 1}, federation={"participation": 0.125}, engine={"threads": 2})
    assert torch.get_num_threads() == 1


def test_the_local_engine_gives_one_reply_for_each_task(federation: Federation) -> None:
    experiment = assemble(small_model(), federation, small_config())
    state = experiment.method.start(experiment.initial)
    chosen = [Participant(client, "1/8") for client in (5, 0, 5)]
    replies = list(experiment.engine.run(experiment.method.tasks(state, chosen, 1)))
    assert [(reply.client, reply.position) for reply in replies] == [(5, 0), (0, 1), (5, 2)]


def test_replies_are_put_in_order_and_only_the_first_to_a_task_counts() -> None:
    replies = [Failure(number, "", position) for number, position in enumerate([2, 0, -1, 0, 4, 1, 7, 2])]
    assert [reply.client for reply in in_task_order(replies, 5)] == [1, 5, 0, 4]
