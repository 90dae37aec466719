"""The local engine with workers gives what it gives without, and says what went wrong as clearly."""

import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.config.schema import EngineConfig
from fedhm.data.federation import Federation
from fedhm.engines.engine import LocalEngine, workers_for
from fedhm.engines.workers import WINDOW
from fedhm.errors import FedhmError
from fedhm.networks.spec import NetworkSpec
from fedhm.report.result import Result
from fedhm.runs.folder import RunFolder
from fedhm.server.collect import in_task_order
from fedhm.server.record import Record
from fedhm.work.messages import Failure, Participant, Reply, Task, TaskOptions, Update


@pytest.fixture(autouse=True)
def _no_child_is_left() -> Iterator[None]:
    yield
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def run(data: Federation, workers: int, model: nn.Module | None = None, **sections: dict[str, object]) -> Result:
    engine = {"threads": 1, "server_threads": 1, **sections.pop("engine", {}), "workers": workers}
    return assemble(model or small_model(), data, small_config(**sections, engine=engine)).run()


def outcome(result: Result) -> tuple[list[dict[str, Any]], dict[str, dict[str, Tensor]]]:
    records = [json.loads(record.to_json()) for record in result.records]
    for record in records:
        del record["seconds"]
    return records, {tier: network.state_dict() for tier, network in result.networks.items()}


def assert_same(one: Result, other: Result) -> None:
    (records, weights), (other_records, other_weights) = outcome(one), outcome(other)
    assert records == other_records
    torch.testing.assert_close(weights, other_weights, rtol=0, atol=0)


def with_dropout() -> nn.Module:
    layers = list(small_model())
    return nn.Sequential(*layers[:9], nn.Dropout(0.3), layers[9])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model"),
    [
        ({}, small_model),
        ({"aggregate": "updates", "weighting": "samples"}, with_dropout),
        ({"name": "feddlr"}, small_model),  # computes with what travelled before it is loaded
        ({"name": "splitmix", "base": 0.5, "tiers": [3, 1]}, small_model),
        ({"name": "fedmd", "tiers": [1, 0.5]}, small_model),  # its clients keep tensors
        ({"name": "fedavg"}, lambda: small_model().double()),
    ],
    ids=["fedhm", "dropout", "feddlr", "splitmix", "fedmd", "double"],
)
def test_results_do_not_depend_on_the_number_of_workers(
    federation: Federation, method: dict[str, object], model: Callable[[], nn.Module]
) -> None:
    network = model()
    if next(network.parameters()).dtype == torch.float64:
        parts = [(s.inputs.double(), s.labels) for s in (*federation.clients, federation.test)]
        federation = fedhm.data.federation.from_arrays(parts[:-1], parts[-1], dtype=torch.float64)
    data = replace(federation, public=federation.clients[5])
    results = [run(data, workers, network, method=method) for workers in (1, 2, 3)]
    assert results[0].records[-1].statistics.clients  # statistics were from_arrays
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.slow
def test_workers_can_have_several_threads_each_after_their_parent_had_some(federation: Federation) -> None:
    """GNU's OpenMP waits for ever, in a forked process, for the threads of the one it was forked from."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        big = torch.rand(500, 500)
        assert (big @ big).relu().sum() > 0
        engine: dict[str, object] = {"threads": 2, "server_threads": 2}
        few: dict[str, dict[str, object]] = {"train": {"rounds": 1}, "federation": {"participation": 0.25}}
        two, one = (run(federation, workers, engine=engine, **few) for workers in (2, 1))
        assert_same(two, one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_a_run_can_be_gone_on_with_by_another_number_of_workers(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(folder: str, workers: int) -> Result:
        settings = {"train": {"rounds": 3, "batch": 8}, "engine": {"threads": 1, "workers": workers}}
        return fedhm.run(small_model(), federation.clients, federation.test, settings, tmp_path / folder)

    whole = go("whole", 1)
    commit = RunFolder.commit

    def stopping(folder: RunFolder, record: Record, *rest: Any) -> None:
        commit(folder, record, *rest)
        if record.round == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "commit", stopping)
        with pytest.raises(KeyboardInterrupt):
            go("stopped", 3)
    assert_same(go("stopped", 2), whole)
    with pytest.raises(FedhmError, match="other settings"):
        fedhm.run(small_model(), federation.clients, federation.test, {"engine": {"threads": 2}}, tmp_path / "whole")


class Troubled(nn.Module):
    """Gets into trouble when it is trained on the samples of one client, by the brightness of its first image."""

    def __init__(self, when: Tensor, trouble: Callable[[], None]) -> None:
        super().__init__()
        self.net, self.when, self.trouble = small_model(), when, trouble

    def __deepcopy__(self, memo: dict[int, Any]) -> "Troubled":
        copy = Troubled(self.when, self.trouble)
        copy.net.load_state_dict(self.net.state_dict())
        return copy

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and any(torch.equal(image, self.when) for image in x):
            self.trouble()
        y: Tensor = self.net(x)
        return y


def troubled(federation: Federation, trouble: Callable[[], None]) -> Troubled:
    pixels = federation.clients[3].inputs[:1].permute(0, 2, 3, 1)
    return Troubled(federation.preprocessing.normalise(pixels)[0], trouble)


def in_trouble(federation: Federation, trouble: Callable[[], None], **sections: dict[str, object]) -> Result:
    everyone: dict[str, object] = {"participation": 1.0}
    method: dict[str, object] = {"name": "fedavg"}
    return run(federation, 2, troubled(federation, trouble), federation=everyone, method=method, **sections)


def test_a_worker_that_dies_ends_the_run_in_a_sentence(federation: Federation) -> None:
    with pytest.raises(FedhmError) as caught:
        in_trouble(federation, lambda: os.kill(os.getpid(), signal.SIGKILL))
    sentence = "a worker process was killed by signal 9 while client 3 (tier full) trained in round 1: there may not be"
    assert str(caught.value).startswith(sentence)
    with pytest.raises(FedhmError, match="a worker process ended with exit code 7 while client 3"):
        in_trouble(federation, lambda: os._exit(7))


def fail(error: Exception) -> Callable[[], None]:
    def raising() -> None:
        raise error

    return raising


def test_a_clients_failure_has_its_reason_and_says_where_it_happened(federation: Federation) -> None:
    with pytest.raises(FedhmError, match=r"client 3 .* cannot be used: no such size") as caught:
        in_trouble(federation, fail(RuntimeError("no such size")))
    shown = "".join(traceback.format_exception(caught.value))
    assert "In a worker process:" in shown
    assert "in forward" in shown
    dropping: dict[str, object] = {"on_bad_update": "drop", "rounds": 1}
    result = in_trouble(federation, fail(ValueError("too bright")), train=dropping)
    assert [(entry["client"], entry["reason"]) for entry in result.records[0].dropped] == [(3, "too bright")]


def test_other_exceptions_of_a_users_network_end_the_run_with_their_traceback(federation: Federation) -> None:
    with pytest.raises(RuntimeError, match=r"client 3 \(tier full\) in round 1 raised KeyError: 'weights'") as caught:
        in_trouble(federation, fail(KeyError("weights")))
    shown = "".join(traceback.format_exception(caught.value))
    assert "In a worker process:" in shown
    assert "in raising" in shown
    with pytest.raises(FedhmError, match=r"^a sentence$"):
        in_trouble(federation, fail(FedhmError("a sentence")))


def test_what_a_network_prints_is_seen_once(federation: Federation, capfd: pytest.CaptureFixture[str]) -> None:
    print("said before", end="")  # still in a buffer when workers are forked
    in_trouble(federation, lambda: print("said by client 3"), train={"rounds": 1})
    said = capfd.readouterr().out
    assert said.count("said before") == 1
    assert said.count("said by client 3\n") == 1


class Echo:
    """A client that sends back what it gets, some later than others."""

    def __init__(self, slow: int = -1) -> None:
        self.slow = slow

    def reply(self, task: Task, position: int) -> Update:
        x = task.tensors["x"]
        for _ in range(200 if position == self.slow else 0):
            torch.rand(200, 200) @ torch.rand(200, 200)
        loss = float("nan") if position % 2 else float("inf")
        kept = {"pid": torch.tensor(os.getpid()), **task.kept}
        samples, labels = int(task.options.extra["samples"]), None if position % 3 else (1, 2)
        found = {"x": x + position}
        what = (task.kind, task.round, task.client, task.tier, task.network)
        return Update(*what, found, samples, labels, loss, position, kept)


def echo_tasks(count: int, taken: list[int] | None = None) -> Iterator[Task]:
    shared = {"x": torch.arange(4.0)}
    for number in range(count):
        if taken is not None:
            taken.append(number)
        kept = {"empty": torch.empty(0, 2), "half": torch.tensor(number, dtype=torch.float16)}
        yield Task(
            "train", 1, 0, "full", NetworkSpec("full"), dict(shared), kept, TaskOptions(extra={"samples": number})
        )


def echoes(workers: int, slow: int = -1) -> LocalEngine:
    return LocalEngine([Echo(slow)], workers)  # type: ignore[list-item]


def test_messages_arrive_whole() -> None:
    engine = echoes(2)
    replies = [reply for reply in in_task_order(engine.run(echo_tasks(20)), 20) if isinstance(reply, Update)]
    assert len(replies) == 20
    for number, reply in enumerate(replies):  # the first are held until the last is there
        assert torch.equal(reply.tensors["x"], torch.arange(4.0) + number)
        assert (reply.samples, reply.labels) == (number, None if number % 3 else (1, 2))
        assert reply.loss == float("inf") or (number % 2 and reply.loss != reply.loss)
        assert reply.kept["half"].dtype == torch.float16
        assert reply.kept["half"] == number
        assert reply.kept["empty"].shape == (0, 2)
    assert os.getpid() not in {int(reply.kept["pid"]) for reply in replies}
    engine.close()


def test_with_many_tasks_few_are_under_way_and_few_replies_are_held() -> None:
    engine, workers, count = echoes(2, slow=500), 2, 2000
    taken: list[int] = []
    early: set[int] = set()
    oldest = answered = 0
    for reply in engine.run(echo_tasks(count, taken)):
        answered += 1
        early.add(reply.position)
        while oldest in early:
            early.remove(oldest)
            oldest += 1
        assert len(early) < WINDOW * workers
        assert len(taken) - oldest <= WINDOW * workers + 1
    assert (answered, oldest) == (count, count)
    assert engine._pool is not None
    assert sum(memory.used for memory in engine._pool._memory) < 100_000
    engine.close()


def pids(replies: list[Reply]) -> set[int]:
    return {int(reply.kept["pid"]) for reply in replies if isinstance(reply, Update)}


def test_workers_are_kept_from_run_to_run_but_not_after_one_that_was_given_up() -> None:
    engine = echoes(2)
    first = pids(list(engine.run(echo_tasks(200))))
    assert pids(list(engine.run(echo_tasks(200)))) <= first
    given_up = engine.run(echo_tasks(200))
    next(given_up)
    assert not pids(list(engine.run(echo_tasks(200)))) & first
    given_up.close()
    assert len(list(engine.run(echo_tasks(5)))) == 5
    stopped = engine.run(echo_tasks(200))
    next(stopped)
    stopped.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    list(engine.run(echo_tasks(3)))
    del engine  # nobody closed it


def test_an_idle_worker_that_is_killed_is_noticed() -> None:
    engine = echoes(2)
    victim = min(pids(list(engine.run(echo_tasks(50)))))
    os.kill(victim, signal.SIGKILL)
    os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)
    with pytest.raises(FedhmError, match="a worker process was killed by signal 9: "):
        list(engine.run(echo_tasks(50)))


def test_no_more_workers_are_started_than_there_are_tasks() -> None:
    engine = echoes(3000)
    assert len(list(engine.run(list(echo_tasks(2))))) == 2
    assert engine._pool is not None
    assert len(engine._pool._workers) == 2
    before = engine._pool
    list(engine.run(list(echo_tasks(1))))
    assert engine._pool is before  # enough of them
    assert len(list(engine.run(list(echo_tasks(4))))) == 4
    assert len(engine._pool._workers) == 4
    assert list(engine.run([])) == []
    engine.close()


class Helpful(io.StringIO):
    """A terminal whose reader does what it is advised to do."""

    def write(self, text: str) -> int:
        if found := re.search(r"'kill -CONT (\d+)'", text):
            os.kill(int(found[1]), signal.SIGCONT)
        return super().write(text)


def test_a_worker_that_is_stopped_is_told_of_and_goes_on(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedhm.engines.workers.STOPPED_CHECK_SECONDS", 0.02)
    monkeypatch.setattr("sys.stderr", said := Helpful())

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)  # another thread may be the one that gets the signal, and this one goes on until it does

    stopped = in_trouble(federation, stop, train={"rounds": 1})
    sentence = (
        r"fedhm: worker process (\d+) was stopped while client 3 \(tier full\) trained in round 1: 'kill -CONT \1' "
    )
    assert re.fullmatch(f"(?:{sentence}lets it go on\n)+", said.getvalue())
    assert_same(stopped, in_trouble(federation, lambda: None, train={"rounds": 1}))


def test_a_worker_that_is_slow_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedhm.engines.workers.STOPPED_CHECK_SECONDS", 0.001)
    monkeypatch.setattr("sys.stderr", said := io.StringIO())
    engine = echoes(2, slow=3)
    assert len(list(engine.run(echo_tasks(5)))) == 5
    engine.close()
    assert said.getvalue() == ""


def test_one_worker_is_this_process_with_the_threads_of_a_task(federation: Federation) -> None:
    seen: list[tuple[int, int]] = []
    model = troubled(federation, lambda: seen.append((os.getpid(), torch.get_num_threads())))
    experiment = assemble(model, federation, small_config(method={"name": "fedavg"}))
    tasks = experiment.method.tasks(experiment.method.start(experiment.initial), [Participant(3, "full")], 1)
    engine = LocalEngine(experiment.engine._clients, 1, 2)  # type: ignore[attr-defined]
    (reply,) = engine.run(tasks)
    assert not isinstance(reply, Failure)
    assert set(seen) == {(os.getpid(), 2)}
    assert torch.get_num_threads() == 1


STEPS = """
import resource
import torch
from fedhm.engines.engine import LocalEngine
LocalEngine([])
torch.set_num_threads(1)
for step in range(20):
    if step == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = [torch.ones(1_000_000 + 100_000 * size) for size in range(5)]
    del gradients
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not learn")
def test_what_a_step_frees_is_there_for_the_next_one() -> None:
    """In a process of its own, since the C library also learns from whatever was freed before."""
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # pages, of which each step uses 6000


def test_how_many_workers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedhm.engines.engine.usable_cores", lambda: 8)
    assert workers_for(EngineConfig(threads=1), 10) == 8
    assert workers_for(EngineConfig(threads=1), 5) == 5
    assert workers_for(EngineConfig(threads=3), 5) == 2
    assert workers_for(EngineConfig(threads=16), 5) == 1
    assert workers_for(EngineConfig(threads=1, workers=20), 5) == 20
    monkeypatch.delattr(os, "fork")
    assert workers_for(EngineConfig(threads=1, workers=20), 5) == 1
