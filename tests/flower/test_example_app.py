"""The app in examples/ on Flower's simulation ends in the weights of `fedhm.run`."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import fedhm
from fedhm.flower.clients import UserModel
from fedhm.flower.processes.superlink import run_status, simulation_superlink, start_run
from fedhm.runs.rounds import read_records
from flower_up import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
APP = Path(__file__).parents[2] / "examples" / "flower-app"


def test_it_trains_as_fedhm_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    with simulation_superlink(tmp_path / "superlink") as connection:
        settings = {"out": str(out), "engine.threads": 1, "engine.server_threads": 1}
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
