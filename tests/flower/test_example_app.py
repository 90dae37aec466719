"""The app in examples/: plain `flwr run` starts it, and its simulation ends in the weights of `fedhm.run`."""

import importlib
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fedhm
from fedhm.flower.clients import UserModel
from fedhm.flower.processes.process import free_ports
from fedhm.flower.processes.superlink import run_status, simulation_superlink, start_run
from fedhm.runs.rounds import read_records
from flower_up import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
APP = Path(__file__).parents[2] / "examples" / "flower-app"


@contextmanager
def _superlink_ended(home: Path) -> Iterator[None]:
    """End the SuperLink that `flwr run` left in the background, which names a file in `home` as its database."""
    try:
        yield
    finally:
        database = str(home / "local-superlink" / "state.db")
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if database in (process / "cmdline").read_text().split("\0"):
                    found.append(process)
            except OSError:
                continue  # ended meanwhile
        for process in found:
            os.kill(int(process.name), signal.SIGTERM)
        wait_until(lambda: not any(process.exists() for process in found), 60)


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the SuperLink in /proc")
def test_plain_flwr_run_starts_it_without_a_change(tmp_path: Path) -> None:
    home, out, log = tmp_path / "home", tmp_path / "run", tmp_path / "log"
    port, control = free_ports(2)
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "UV_OFFLINE": "1",  # nothing is to be installed when it starts
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    command = ["flwr", "run", str(APP), "--stream", "--run-config", f"out='{out}'"]
    with _superlink_ended(home), log.open("w") as file:
        subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=400, check=False)
        wait_until((out / "report.md").exists, 60)
    assert "round 3/3" in log.read_text(), log.read_text()
    assert read_records(out / "records.jsonl")[-1].metrics["1/4"].accuracy > 0.8


def test_it_trains_as_fedhm_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    with simulation_superlink(tmp_path / "superlink") as connection:
        settings = {"out": str(out), "federation.clients": 4, "engine.threads": 1, "engine.server_threads": 1}
        run_id = start_run(connection, APP, settings, "num-supernodes=4 client-resources-num-cpus=1")
        wait_until((out / "report.md").exists, 300)
        wait_until(lambda: run_status(connection, run_id) == "finished:completed", 60)

    monkeypatch.syspath_prepend(APP)
    task = importlib.import_module("mixed_fleet.task")
    app = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    inputs, labels = task._digits()
    clients = [(inputs[task.TEST :][part::4], labels[task.TEST :][part::4]) for part in range(4)]
    config = {
        "federation": app["federation"],
        "train": app["train"],
        "method": {"name": "fedhm", "tiers": [1, "1/2", "1/4"]},
        "engine": {"threads": 1, "server_threads": 1},
    }
    result = fedhm.run(UserModel(task.build_model, 0).build(), clients, task.test_data(), config)
    for tier, network in result.networks.items():
        path = out / "models" / f"{tier.replace('/', '-')}.safetensors"
        found = fedhm.load_tier(path, UserModel(task.build_model, 0).build())
        for name, tensor in network.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor), (tier, name)
    last = read_records(out / "records.jsonl")[-1]
    assert last.metrics == result.metrics
    assert last.metrics["1/4"].accuracy > 0.85
    sys.modules.pop("mixed_fleet.task")
