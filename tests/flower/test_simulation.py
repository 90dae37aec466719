"""Runs on Flower's simulation, with real processes, end in exactly the weights of the local engine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import forked
from fedhm.cli import main
from fedhm.config.loading import load_config
from fedhm.config.schema import Config
from fedhm.flower.processes.superlink import run_status, simulation_superlink, start_run
from fedhm.flower.processes.supervisor import descendants
from fedhm.flower.submit import is_gone, read_status
from fedhm.report.page import LivePages
from fedhm.run import prepare
from fedhm.runs.folder import RunFolder, read_config
from fedhm.runs.rounds import read_records
from flower_up import wait_until
from installed import install
from run_outcome import weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
APPS = Path(__file__).parent / "apps"
OWN_METHOD = Path(__file__).parents[2] / "examples" / "own_method.py"
SMALL = [
    "data.train_samples=240",
    "federation.clients=4",
    "train.rounds=2",
    "engine.threads=1",
    "engine.server_threads=1",
]
METHODS = {
    "fp16": ["engine.fp16=true", "train.nested_form=beside"],  # longer steps would part more than rounding does
    "fedavg": ["method.name=fedavg"],
    "fedmedian": ["method.name=fedmedian", "method.strength=0.9"],  # of a package of a user's
    "heterofl": ["method.name=heterofl"],
    "splitmix": ["method.name=splitmix", "data.client_test=0.2"],
    "fedmd": ["method.name=fedmd", "data.public=held-out", "data.public_samples=40"],
    "fedhm-dynamic": [
        "federation.heterogeneity=dynamic",
        "evaluation.static_from=never",
        "federation.participation=1.0",
    ],
}


def settings(*changes: str) -> Config:
    return load_config("digits", [*SMALL, *changes]).resolved()


def run_locally(config: Config, out: Path) -> None:
    with RunFolder.create(out, config) as folder:
        prepare(config).run(folder)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""  # ended meanwhile


def assert_same_models(one: Path, other: Path) -> None:
    names = sorted(path.name for path in (one / "models").iterdir())
    assert names == sorted(path.name for path in (other / "models").iterdir())
    for name in names:
        assert weights(one / "models" / name) == weights(other / "models" / name), name


def test_a_run_that_was_interrupted_and_resumed_ends_as_the_local_engine_does(tmp_path: Path) -> None:
    boards = tmp_path / "boards"
    rounds = 24  # each takes a quarter of a second, and the signal must come before the last
    length = [f"train.rounds={rounds}", f"evaluation.every={rounds}"]
    changes = [*SMALL, *length, "engine.name=flower", f"tracking.tensorboard={boards}"]
    command = ["run", "digits", "--set", *changes, "--out", str(tmp_path / "run")]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forked.fedhm(command, **streams, start_new_session=True) as process:
        try:
            wait_until(lambda: read_records(tmp_path / "run" / "records.jsonl") or process.poll() is not None)
            below = list(descendants(process.pid))
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=200)
        finally:
            process.kill()
    assert len(below) > 3  # Ray's processes among them
    assert process.returncode == 130, said
    assert f"fedhm: stopped; 'fedhm resume {tmp_path}/run' resumes from the last complete round" in said
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
    watched = LivePages([tmp_path / "run"])  # what a browser would be shown between its records
    begun = watched.latest()
    assert f"of its {rounds} rounds" in begun.part
    assert "run has done all" not in begun.part

    assert main(["resume", str(tmp_path / "run")]) == 0
    wait_until(lambda: watched.latest().version != begun.version)
    assert f"run has done all of its {rounds} rounds" in watched.latest().part
    run_locally(settings(*length), tmp_path / "local")
    assert_same_models(tmp_path / "run", tmp_path / "local")
    assert read_config(tmp_path / "run").server.robust == "none"  # nobody is hostile in a simulation
    ours, theirs = (read_records(tmp_path / name / "records.jsonl") for name in ("run", "local"))
    for here, there in zip(ours, theirs, strict=True):
        assert here.participants == there.participants
        assert here.metrics == there.metrics
        for tier, traffic in here.traffic.items():
            down, up = there.traffic[tier].down, there.traffic[tier].up  # bytes of the bare tensors
            assert down < traffic.down < down + 5000 * traffic.clients
            assert up < traffic.up < up + 5000 * traffic.clients
    assert (tmp_path / "run" / "report.md").exists()
    board = EventAccumulator(str(boards / "run"))
    board.Reload()
    assert [event.step for event in board.Scalars("participants")] == list(range(1, rounds + 1))


def test_every_kind_of_method_ends_as_with_the_local_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", OWN_METHOD, "methods", {"fedmedian": "FedMedian"}, monkeypatch)
    configs = {name: settings(*changes) for name, changes in METHODS.items()}
    news = tmp_path / "status.json"
    given = {
        "configs": json.dumps({name: config.to_toml() for name, config in configs.items()}),
        "out": str(tmp_path / "flower"),
        "status": str(news),
        "nodes": str(tmp_path / "nodes.json"),
    }
    before, below = set(descendants(os.getpid())), set[int]()
    with simulation_superlink(tmp_path / "superlink") as connection:
        run = start_run(connection, APPS / "methods", given, "num-supernodes=4 client-resources-num-cpus=1")
        wait_until((tmp_path / "nodes.json").exists)
        assert run_status(connection, run) == "running"
        if sys.platform == "linux":
            below = set(descendants(os.getpid())) - before
            assert any("raylet" in command_line(pid) for pid in below)
        wait_until(lambda: (read_status(news) or {}).get("state") == "ended" or (news.exists() and is_gone(news)), 600)
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]  # Ray below it ended with the SuperLink
    nodes = json.loads((tmp_path / "nodes.json").read_text())
    assert sorted(node["partition-id"] for node in nodes) == [0, 1, 2, 3]
    status = read_status(news)
    assert status is not None
    assert status["state"] == "ended"
    assert status["error"] == ""
    for name, config in configs.items():
        run_locally(config, tmp_path / "local" / name)
        if name != "fp16":
            assert_same_models(tmp_path / "flower" / name, tmp_path / "local" / name)
    there, here = (read_records(tmp_path / where / "splitmix" / "records.jsonl") for where in ("flower", "local"))
    assert [record.clients for record in there] == [record.clients for record in here]
    assert here[-1].clients.keys() == here[-1].metrics.keys()
    halved, whole = (read_records(tmp_path / where / "fp16" / "records.jsonl") for where in ("flower", "local"))
    for ours, theirs in zip(halved, whole, strict=True):
        for tier, traffic in ours.traffic.items():
            assert 0.5 < traffic.up / theirs.traffic[tier].up < 0.6
            assert traffic.loss == pytest.approx(theirs.traffic[tier].loss, rel=0.02)
