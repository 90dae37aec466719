"""Clients evaluate every tier's model on test samples of their own, with any method, objective and engine."""

import json
from dataclasses import replace

import pytest
import torch

from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.data.federation import ClientTests, Federation, from_arrays, hold_out_client_tests
from fedhm.data.samples import Feed, concatenate
from fedhm.errors import FedhmError
from fedhm.networks.spec import NetworkSpec
from fedhm.report.result import Result
from fedhm.server.sampling import evaluators
from fedhm.work.evaluate import evaluate
from fedhm.work.messages import Failure, Reply, Task, TaskOptions, Update
from test_experiment import Meddling, same


@pytest.fixture
def tested(federation: Federation) -> Federation:
    """The clients of the federation, the last of which has no test samples."""
    left, tests = hold_out_client_tests(federation.clients, 0.3, 0)
    nothing = tests.samples[-1].subset(torch.arange(0))
    return replace(federation, clients=left, client_tests=ClientTests([*tests.samples[:-1], nothing]))


def run(data: Federation, engine: type[Meddling] | None = None, /, **sections: dict[str, object]) -> Result:
    experiment = assemble(small_model(), data, small_config(**sections))
    if engine is not None:
        experiment.engine = engine(experiment)
    return experiment.run()


def lines(result: Result) -> list[dict[str, object]]:
    found = [json.loads(record.to_json()) for record in result.records]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


@pytest.mark.parametrize(
    ("method", "static_from"),
    [("fedhm", 0), ("fedhm", "never"), ("splitmix", 0), ("feddlr", 0), ("fedrolex", 0), ("fedpara", 0)],
)
def test_pooled_metrics_are_those_of_the_final_models_on_all_tests(
    tested: Federation, method: str, static_from: object
) -> None:
    result = run(tested, method={"name": method}, train={"rounds": 1}, evaluation={"static_from": static_from})
    joint = Feed(concatenate(tested.client_tests.samples), tested.preprocessing)
    for tier, network in result.networks.items():
        found = result.clients[tier]
        plain = evaluate(network, joint, 128, small_config().objective)
        assert found.overall.pooled == pytest.approx(plain, rel=1e-4)
        assert [one.client for one in found.each] == list(range(7))
        assert [one.samples for one in found.each] == [tested.client_tests.count(client) for client in range(7)]
        assert sum(group.clients for group in found.by_tier.values()) == found.overall.clients == 7


def test_evaluating_changes_nothing_else_and_is_counted_apart(tested: Federation) -> None:
    without = run(replace(tested, client_tests=ClientTests()))
    result = run(tested)
    assert same(result, without)
    for line, plain in zip(lines(result), lines(without), strict=True):
        assert {key: value for key, value in line.items() if key not in ("clients", "evaluation")} == plain
    record = result.records[-1]
    tests = sum(tested.client_tests.count(client) for client in range(8))
    assert record.evaluation.clients == record.evaluation.answers == 7 * 4
    assert record.evaluation.macs == tests * sum(cost.macs for cost in result.costs.values())
    assert record.evaluation.down == 7 * sum(cost.bytes for cost in result.costs.values())  # with statistics
    assert record.evaluation.up == 7 * 4 * 2 * 8
    assert without.clients == {}


def test_results_do_not_depend_on_workers_and_order(tested: Federation) -> None:
    one, two = (run(tested, engine={"workers": workers}, train={"rounds": 1}) for workers in (1, 2))
    assert lines(one) == lines(two)
    assert lines(run(tested, Meddling, train={"rounds": 1})) == lines(one)


def test_numbers_are_pooled_as_well() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(60, 6)
    targets = inputs @ torch.randn(6, 2)
    clients = [(inputs[i:50:5], targets[i:50:5]) for i in range(5)]
    config = small_config(objective={"name": "regression"}, federation={"clients": 5}, method={"tiers": [1, "1/4"]})
    federation = from_arrays(clients, (inputs[50:], targets[50:]), objective=config.objective, client_test=0.2)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 2)
    )
    result = assemble(model, federation, config).run()
    joint = Feed(concatenate(federation.client_tests.samples), federation.preprocessing)
    plain = evaluate(result.networks["1/4"], joint, 128, config.objective)
    assert result.clients["1/4"].overall.pooled == pytest.approx(plain, rel=1e-5)


def test_clients_that_a_method_leaves_out_judge_its_model_too(tested: Federation) -> None:
    result = run(tested, method={"name": "capable"}, train={"rounds": 1})
    assert list(result.clients) == ["full"]
    assert list(result.clients["full"].by_tier) == ["full", "1/2", "1/4", "1/8"]


class Lying(Meddling):
    """Client 1 claims that nothing is right, client 2 more than can be, client 3 does not answer."""

    def meddle(self, reply: Reply) -> Reply:
        if not isinstance(reply, Update) or reply.kind != "evaluate":
            return reply
        if reply.client in (1, 2):
            right = torch.tensor(0.0 if reply.client == 1 else 1e6).double()
            return replace(reply, tensors={**reply.tensors, "correct": right})
        return Failure(3, "it caught fire", reply.position) if reply.client == 3 else reply


def test_a_bad_answer_costs_only_itself(tested: Federation) -> None:
    drop = {"on_bad_update": "drop", "rounds": 1}
    result, honest = run(tested, Lying, train=drop), run(tested, train=drop)
    found = result.clients["full"]
    assert [one.client for one in found.each] == [0, 1, 4, 5, 6]
    assert found.each[1].metrics.accuracy == 0
    assert [found.each[i] for i in (0, 2)] == [honest.clients["full"].each[i] for i in (0, 4)]
    reasons = {(entry["client"], entry["kind"]): entry["reason"] for entry in result.records[0].dropped}
    assert reasons[2, "evaluate"] == "'correct' has the value 1e+06, not in 0…6"
    assert reasons[3, "evaluate"] == "it caught fire"
    assert result.records[0].evaluation.answers == 5 * 4
    with pytest.raises(FedhmError, match=r"client 2 .* in round 1 cannot be used: 'correct' has the value"):
        run(tested, Lying)


class Gone(Meddling):
    def meddle(self, reply: Reply) -> Reply:
        evaluated = isinstance(reply, Update) and reply.kind == "evaluate" and reply.network.tier == "1/4"
        return Failure(reply.client, "nobody there", reply.position) if evaluated else reply


def test_a_tier_that_nobody_evaluates_ends_a_run_without_a_test_set(tested: Federation) -> None:
    with pytest.raises(FedhmError, match=r"no client could evaluate tier 1/4 in round 1: of client 6, nobody there"):
        run(replace(tested, test=None), Gone, train={"on_bad_update": "drop"})


def test_clients_that_evaluate_nothing_do_not_end_a_run_with_a_test_set(tested: Federation) -> None:
    result = run(tested, Gone, train={"on_bad_update": "drop"})
    assert result.clients == {}
    assert result.metrics == run(tested, train={"on_bad_update": "drop"}).metrics
    assert {entry["reason"] for entry in result.records[-1].dropped} == {"nobody there"}


class FirstGone(Meddling):
    """The clients that are asked first do not evaluate."""

    def meddle(self, reply: Reply) -> Reply:
        first = next(evaluators(EVALUATED_BY_ONE, range(7), 8, ("full", "1/2", "1/4", "1/8"), 1))
        gone = isinstance(reply, Update) and reply.kind == "evaluate" and reply.client in {p.client for p in first}
        return Failure(reply.client, "nobody there", reply.position) if gone else reply


EVALUATED_BY_ONE = small_config(evaluation={"participation": 0.1})


def test_other_clients_evaluate_if_the_chosen_ones_do_not(tested: Federation) -> None:
    """A client that is not connected must not end a run, though only clients have test samples."""
    sections: dict[str, dict[str, object]] = {"evaluation": {"participation": 0.1}}
    sections["train"] = {"on_bad_update": "drop", "rounds": 1}
    (record,) = run(replace(tested, test=None), FirstGone, **sections).records
    (gone,) = next(evaluators(EVALUATED_BY_ONE, range(7), 8, ("full", "1/2", "1/4", "1/8"), 1))
    for found in record.clients.values():
        (one,) = found.each
        assert one.client != gone.client
    assert {entry["client"] for entry in record.dropped} == {gone.client}


def test_a_share_of_the_clients_evaluates_others_in_each_round() -> None:
    config = small_config(evaluation={"participation": 0.5})
    levels = ("full", "1/2")
    drawn = [
        [p.client for p in next(evaluators(config, [0, 2, 3, 5, 7, 6], 8, levels, number))] for number in (1, 1, 2, 3)
    ]
    assert drawn[0] == drawn[1]
    assert len({tuple(clients) for clients in drawn}) > 1
    assert all(len(clients) == 3 and clients == sorted(clients) and 1 not in clients for clients in drawn)
    (everybody,) = evaluators(small_config(), [0, 1, 2], 8, levels, 1)
    assert [(p.client, p.tier) for p in everybody] == [(0, "full"), (1, "1/2"), (2, "full")]


def test_a_client_without_test_samples_says_so(federation: Federation) -> None:
    experiment = assemble(small_model(), federation, small_config())
    weights = experiment.method.weights(experiment.method.start(experiment.initial), "full")
    (reply,) = experiment.engine.run(
        [Task("evaluate", 1, 0, "full", NetworkSpec("full"), weights, options=TaskOptions(batch=8))]
    )
    assert isinstance(reply, Failure)
    assert reply.reason == "it has no test samples"
