"""A round that brings too few updates is tried again with other clients, and leaves no trace but in its record."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.config.schema import FederationConfig
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.experiment import Experiment
from fedhm.report.result import Result
from fedhm.runs.folder import RunFolder
from fedhm.server.collect import collect
from fedhm.server.record import Record
from fedhm.server.sampling import sample_participants
from fedhm.server.state import flatten
from fedhm.work.messages import Failure, Reply, Task

LEVELS = ["full", "1/2", "1/4", "1/8"]


class Faulty:
    """The local engine; tasks fail for which `fails(task, run)` says so, in the engine's 0th, 1st, … run."""

    def __init__(self, experiment: Experiment, fails: Callable[[Task, int], bool]) -> None:
        self._engine, self._fails = experiment.engine, fails
        self.runs: list[list[Task]] = []

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        tasks, number = list(tasks), len(self.runs)
        self.runs.append(tasks)
        for reply in self._engine.run(tasks):
            failed = self._fails(tasks[reply.position], number)
            yield Failure(reply.client, f"fault {number}", reply.position, down=5, up=7) if failed else reply

    def close(self) -> None:
        self._engine.close()


def run(
    data: Federation, fails: Callable[[Task, int], bool], folder: RunFolder | None = None, **sections: dict[str, object]
) -> tuple[Result, list[list[Task]]]:
    sections = {**sections, "train": {"on_bad_update": "drop", "rounds": 2, **sections.get("train", {})}}
    experiment = assemble(small_model(), data, small_config(**sections))
    experiment.engine = engine = Faulty(experiment, fails)
    return experiment.run(folder), engine.runs


def clients(tasks: Iterable[Task]) -> list[int]:
    return sorted({task.client for task in tasks})


def test_later_attempts_ask_others_first_and_are_drawn_by_the_seed() -> None:
    config = FederationConfig(participation=0.3)
    for number in range(1, 30):
        first, second, third, fourth, fifth = islice(sample_participants(config, 10, LEVELS, 0, number), 5)
        assert first == next(sample_participants(config, 10, LEVELS, 0, number))
        asked = [p.client for attempt in (first, second, third) for p in attempt]
        assert len(set(asked)) == 9
        assert set(range(10)) - set(asked) < {p.client for p in fourth}  # the one who is left, and two others
        assert [len(attempt) for attempt in (first, second, third, fourth, fifth)] == [3] * 5
        assert all(p.tier == LEVELS[p.client % 4] for p in (*second, *third))
        assert second == list(islice(sample_participants(config, 10, LEVELS, 0, number), 2))[1]
    seconds = {
        tuple(p.client for p in list(islice(sample_participants(config, 10, LEVELS, seed, number), 2))[1])
        for number in range(1, 6)
        for seed in range(5)
    }
    assert len(seconds) > 15


def test_a_client_keeps_the_tier_that_it_drew_for_the_round() -> None:
    config = FederationConfig(participation=0.5, heterogeneity="dynamic")
    tiers: dict[int, str] = {}
    for attempt in islice(sample_participants(config, 10, LEVELS, 0, 1), 6):
        for p in attempt:
            assert tiers.setdefault(p.client, p.tier) == p.tier
    assert len(tiers) == 10


@pytest.mark.parametrize("method", ["fedhm", "fedavg", "heterofl", "fedrolex", "feddlr", "splitmix"])
def test_a_failed_attempt_leaves_the_state_as_it_was(federation: Federation, method: str) -> None:
    """Some of its updates have been folded in already when it turns out that there are too few."""
    name: dict[str, object] = {"name": method, **({"tiers": [1]} if method == "splitmix" else {})}
    sections = {"method": name, "federation": {"min_updates": 3}, "train": {"on_bad_update": "drop"}}
    experiment, plain = (assemble(small_model(), federation, small_config(**sections)) for _ in range(2))
    first, second = islice(experiment._sample(1), 2)
    failing = {p.client for p in first[2:]}
    experiment.engine = engine = Faulty(experiment, lambda task, _: task.client in failing)
    record = Record(1)
    merged = experiment.train_round(experiment.method.start(experiment.initial), record)
    assert [clients(tasks) for tasks in engine.runs] == [[p.client for p in chosen] for chosen in (first, second)]
    assert (record.attempts, record.participants) == (2, second)
    assert {entry["client"] for entry in record.dropped} == failing
    state = plain.method.start(plain.initial)
    tasks = plain.filters.admission.tasks(list(plain.method.tasks(state, second, 1)), Record(1))
    updates = collect(plain.engine.run, tasks, [plain.filters.admission], Record(1))
    expected = plain.method.merge(state, updates, 1)
    ours, theirs = flatten(merged)[0], flatten(expected)[0]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_the_record_tells_of_all_attempts(federation: Federation) -> None:
    result, runs = run(federation, lambda _, run: run == 0, train={"rounds": 1})
    (record,) = result.records
    assert record.attempts == 2
    assert [p.client for p in record.participants] == clients(runs[1])
    assert [entry["client"] for entry in record.dropped] == clients(runs[0])
    assert {entry["reason"] for entry in record.dropped} == {"fault 0"}
    traffic = record.traffic.values()
    assert sum(t.clients for t in traffic) == 8
    assert sum(t.answers for t in traffic) == 4
    assert record.seconds["merge"] > 0
    assert Record.from_json(record.to_json()).attempts == 2
    old = record.to_json().replace(', "attempts": 2', "")
    assert Record.from_json(old).attempts == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("least", "sentence"),
    [
        (1, r"^no client's update could be used in round 2, none of 4 in attempt 3 of 3: of client \d, fault \d$"),
        (4, r"^too few updates could be used in round 2, [123] of 4 in attempt 3 of 3: of client \d, fault \d$"),
    ],
)
def test_after_the_last_attempt_the_run_ends_and_can_be_gone_on_with(
    federation: Federation, tmp_path: Path, least: int, sentence: str
) -> None:
    sections: dict[str, dict[str, object]] = {"federation": {"min_updates": least}, "train": {"rounds": 3}}

    def fails(task: Task, _: int) -> bool:
        return task.round == 2 and (least == 1 or task.client % 2 == 0)

    config = small_config(**{**sections, "train": {**sections["train"], "on_bad_update": "drop"}})
    with RunFolder.create(tmp_path / "run", config) as folder, pytest.raises(FedhmError, match=sentence):
        run(federation, fails, folder, **sections)
    with RunFolder.open(tmp_path / "run") as folder:
        resumed, _ = run(federation, lambda *_: False, folder, **sections)
    whole, _ = run(federation, lambda *_: False, **sections)
    assert [record.attempts for record in resumed.records] == [1, 1, 1]
    for tier, network in whole.networks.items():
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, resumed.networks[tier].state_dict()[name])


def test_a_minimum_that_no_round_can_reach_is_refused_at_once(federation: Federation) -> None:
    with pytest.raises(FedhmError, match=r"^federation.min_updates = 5, but 4 clients take part in a round$"):
        assemble(small_model(), federation, small_config(federation={"min_updates": 5}))


def test_all_tiers_statistics_are_one_exchange(federation: Federation) -> None:
    _, runs = run(federation, lambda *_: False, train={"rounds": 1})
    assert [{task.kind for task in tasks} for tasks in runs] == [{"train", "nested"}, {"statistics"}]
    assert [task.network.tier for task in runs[1]] == [tier for tier in LEVELS for _ in range(4)]


def test_statistics_that_nobody_gave_are_asked_of_others(federation: Federation) -> None:
    missing = ("1/2", "1/8")
    result, runs = run(federation, lambda task, run: run == 1 and task.network.tier in missing, train={"rounds": 1})
    assert [task.network.tier for task in runs[2]] == ["1/2"] * 4 + ["1/8"] * 4
    assert not set(clients(runs[2])) & set(clients(runs[1]))
    (record,) = result.records
    assert (record.attempts, len(record.dropped), record.statistics.clients) == (1, 8, 24)
    assert all(score.loss < 100 for score in result.metrics.values())
    sentence = r"^no client's BatchNorm statistics of tier 1/4 could be used in round 1: of client \d, fault 3$"
    with pytest.raises(FedhmError, match=sentence):
        run(federation, lambda task, _: task.kind == "statistics" and task.network.tier == "1/4", train={"rounds": 1})


def test_one_client_suffices_for_a_tiers_statistics(federation: Federation) -> None:
    _, runs = run(federation, lambda task, run: run == 1 and task.client != 4, train={"rounds": 1})
    assert 4 in clients(runs[0])
    assert len(runs) == 2


def test_statistics_of_too_few_clients_are_asked_of_others(federation: Federation) -> None:
    at_least = {"federation": {"min_updates": 4}, "train": {"rounds": 1}}
    _, runs = run(federation, lambda task, run: run == 1 and (task.client, task.network.tier) == (4, "1/2"), **at_least)
    assert 4 in clients(runs[0])
    assert [task.network.tier for task in runs[2]] == ["1/2"] * 4
    assert len(runs) == 3
    sentence = r"^too few clients' BatchNorm statistics of tier full could be used in round 1: of client 4, fault 1$"
    with pytest.raises(FedhmError, match=sentence):
        run(
            federation,
            lambda task, _: task.kind == "statistics" and task.client == 4,
            federation={"min_updates": 4, "attempts": 1},
            train={"rounds": 1},
        )


def test_by_default_a_bad_update_stops_a_local_run_and_is_dropped_on_flower() -> None:
    for engine, reaction in (("local", "stop"), ("flower", "drop")):
        assert small_config(engine={"name": engine}).resolved().train.on_bad_update == reaction
        for said in ("stop", "drop"):
            config = small_config(engine={"name": engine}, train={"on_bad_update": said})
            assert config.resolved().train.on_bad_update == said
