"""Devices on Flower get the plan of a local run, whether the server's config lists them or nodes name their files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedhm
from fedhm.assembly import design
from fedhm.config.loading import parse
from fedhm.config.schema import Config, DeviceProfile, Measurement
from fedhm.data.federation import Federation, remote_federation
from fedhm.data.samples import Preprocessing
from fedhm.flower import client_app
from fedhm.flower.clients import UserModel
from fedhm.flower.server import run_on_grid
from fedhm.networks.exchange import structure_digest
from fedhm.runs.folder import read_config
from fedhm.runs.rounds import read_records
from fedhm.server.filters.fleet import TierWork
from flower_loopback import Loopback, LoopbackNode

pytestmark = pytest.mark.usefixtures("without_figures")
ROUNDS = 2


def build_model() -> nn.Module:
    torch.manual_seed(0)
    block = [nn.Sequential(nn.Linear(24, 24), *[nn.Tanh()] * 12) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 24), *block, nn.Linear(24, 3))


def samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(20 + number, 8, generator=torch.Generator().manual_seed(number))
    return inputs, inputs[:, :3].argmax(dim=1)


def settings(devices: list[dict[str, Any]], **federation: Any) -> dict[str, Any]:
    known = {"clients": 3, "participation": 1.0, "reference_macs_per_second": 1e5, "devices": devices}
    return {
        "federation": {**known, **federation},
        "train": {"rounds": ROUNDS, "batch": 8, "lr": 0.05},
        "method": {"name": "fedhm", "tiers": [1, "1/4"]},
        "server": {"robust": "none"},  # as on one machine
        "engine": {"threads": 1, "server_threads": 1, "workers": 1, "patience": 0.0},
    }


def node(client: int, **config: str | int) -> LoopbackNode:
    app = client_app(build_model, lambda context: samples(int(context.node_config["partition-id"])))
    return LoopbackNode(app, {"partition-id": client, "num-partitions": 3, **config})


def federation(sizes: tuple[int, ...], _: str) -> Federation:
    return remote_federation(samples(9), 3, sizes, Preprocessing())


def on_flower(nodes: list[LoopbackNode], out: Path, table: dict[str, Any]) -> Config:
    run_on_grid(
        Loopback(dict(enumerate(nodes, start=1))), parse(table, "test"), UserModel(build_model, 0), federation, out, []
    )
    return read_config(out)


def here(out: Path, table: dict[str, Any]) -> Config:
    fedhm.run(build_model(), [samples(number) for number in range(3)], samples(9), table, out)
    return read_config(out)


def needed(checkpointing: bool) -> int:
    """Return the memory of a client of the largest tier, which trains the smaller one beside it."""
    config = parse(settings([]), "test")
    built = design(config, build_model(), torch.zeros(1, 8), 3)
    return TierWork(built.method, built.model, config, (8,)).memory("full", checkpointing)


def profile(**changes: Any) -> DeviceProfile:
    steps = [
        Measurement(network=name, macs=1000, seconds=seconds, memory=9000)
        for name, seconds in (("nested full", 2.0), ("1/4", 0.1))
    ]
    known = {
        "name": "phone",
        "model": structure_digest(build_model(), (8,)),
        "described": "x",
        "machine": "m",
        "threads": 1,
    }
    return DeviceProfile(**{**known, "batch": 8, "optimizer": "sgd", "steps": steps, "up": 1e4, **changes})


def test_a_server_that_lists_devices_plans_and_counts_as_a_local_run(tmp_path: Path) -> None:
    limit = needed(checkpointing=True)
    table = settings(
        [
            {"name": "strong", "clients": [1], "speed": 1, "up": "10kB/s"},
            {"name": "small", "clients": [2], "speed": 1, "memory": limit},
            {"name": "slow", "clients": [0], "speed": 0.02, "down": "20kB/s"},
        ],
        deadline=20,
    )
    local, flower = here(tmp_path / "here", table), on_flower([node(n) for n in range(3)], tmp_path / "flower", table)
    assert local.federation.plan == flower.federation.plan == ("1/4", "full", "full")
    assert local.federation.checkpointed == flower.federation.checkpointed == (2,)
    records = [read_records(tmp_path / where / "records.jsonl") for where in ("here", "flower")]
    assert [record.simulated for record in records[0]] == [record.simulated for record in records[1]]
    assert [record.metrics for record in records[0]] == [record.metrics for record in records[1]]


def test_nodes_that_name_their_files_get_the_same_plan(tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    file.write_text(profile().model_dump_json())
    asked = {"name": "phone 1", "clients": [0, 2], "file": str(file)}
    table = settings([asked, {"name": "device 2", "clients": [1], "memory": 10_000_000}], unfit="leave-out")
    nodes = [node(0, **{"device-file": str(file)}), node(1, memory="10MB"), node(2, **{"device-file": str(file)})]
    local, flower = here(tmp_path / "here", table), on_flower(nodes, tmp_path / "flower", settings([]))
    assert local.federation == flower.federation
    table = settings([], deadline=0)
    grid_again = on_flower(nodes, tmp_path / "flower", table)  # a finished run resumes with what nodes said then
    assert grid_again.federation == flower.federation


def test_nodes_that_name_only_their_memory_get_the_same_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, again = needed(checkpointing=False), needed(checkpointing=True)
    spared = [whole, again, again - 1]
    table = settings([{"name": f"device {n}", "clients": [n], "memory": size} for n, size in enumerate(spared)])
    given_back: list[int] = []
    monkeypatch.setattr("fedhm.flower.clients.return_freed_memory", lambda: given_back.append(1))
    local = here(tmp_path / "here", table).federation
    assert not given_back, "devices are only simulated here"
    nodes = [node(n, memory=f"{size}B") for n, size in enumerate(spared)]
    flower = on_flower(nodes, tmp_path / "flower", settings([])).federation
    assert local.plan == flower.assignment == ("full", "full", "1/4")
    assert local.checkpointed == flower.checkpointed == (1,)
    assert given_back, "or nodes would take more than they can spare"
    records = [read_records(tmp_path / where / "records.jsonl") for where in ("here", "flower")]
    assert [record.metrics for record in records[0]] == [record.metrics for record in records[1]]


def test_a_node_with_a_foreign_or_missing_file_takes_no_part(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(profile().model_dump_json())
    (tmp_path / "other.json").write_text(profile(model="0").model_dump_json())
    files = [str(tmp_path / name) for name in ("own.json", "other.json", "none.json")]
    on_flower([node(n, **{"device-file": file}) for n, file in enumerate(files)], tmp_path / "run", settings([]))
    for record in read_records(tmp_path / "run" / "records.jsonl"):
        reasons = {each["client"]: each["reason"] for each in record.dropped}
        assert reasons[1].startswith("its device file is of no use here: it was measured with another model")
        assert "cannot read the device file" in reasons[2]
        assert set(reasons) == {1, 2}


def test_a_node_whose_file_has_too_little_memory_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(profile(memory=100).model_dump_json())
    nodes = [node(0), node(1, **{"device-file": str(tmp_path / "own.json")}), node(2)]
    config = on_flower(nodes, tmp_path / "run", settings([]))
    assert config.federation.plan == ("full", "none", "full")
