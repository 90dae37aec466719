"""A Flower federation with a node that has a training graph instead of a model: the reference client."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedhm.config.loading import parse_flat
from fedhm.config.registry import make
from fedhm.data.federation import Federation, remote_federation
from fedhm.data.samples import Preprocessing
from fedhm.export.training import TrainingSource, write_training
from fedhm.flower import client_app
from fedhm.flower.clients import UserModel
from fedhm.flower.deployment import connection_of
from fedhm.flower.processes.superlink import run_status, start_run
from fedhm.flower.server import run_on_grid
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.plan import plan_ranks
from fedhm.ondevice.graph import Example
from fedhm.runs.rounds import read_records
from flower_loopback import Loopback, LoopbackNode
from flower_up import Up, wait_until

pytest.importorskip("executorch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("without_figures")]
EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS: dict[str, Any] = {
    "federation.clients": 2,
    "federation.participation": 1.0,
    "train.rounds": 2,
    "train.batch": 8,
    "train.lr": 0.05,
    "method.tiers": "[1, 1/4]",
    "method.keep": 0,
    "engine.patience": 0.0,
    "engine.threads": 1,
    "engine.server_threads": 1,
}


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def samples(number: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(20, 12, generator=torch.Generator().manual_seed(number))
    return inputs, inputs[:, :3].argmax(dim=1)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the manifest of tier 1/4, as its clients train it."""
    config = parse_flat(SETTINGS, "test").resolved()
    model = UserModel(build_model, 0).build()
    network = to_hybrid(model, plan_ranks(model, "1/4", keep=0, classifier="4"))
    example = Example(*samples(5), outputs=3)
    source = TrainingSource(network, "1/4", make("objectives", "classification"), config.train, example)
    found = write_training(source, tmp_path_factory.mktemp("phone")).manifest
    assert found is not None
    return found


@pytest.fixture
def phone_client() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLES))
    import phone_client

    yield phone_client
    sys.path.remove(str(EXAMPLES))


def federation(sizes: tuple[int, ...], _: str) -> Federation:
    return remote_federation(samples(9), 3, sizes, Preprocessing())


def run(grid: Loopback, out: Path) -> None:
    run_on_grid(grid, parse_flat(SETTINGS, "test"), UserModel(build_model, 0), federation, out, [])


def library_node(client: int, tier: str) -> LoopbackNode:
    app = client_app(build_model, lambda context: samples(int(context.node_config["partition-id"])))
    return LoopbackNode(app, {"partition-id": client, "num-partitions": 2, "tier": tier})


def test_a_phone_trains_its_tier_beside_other_nodes(manifest: Path, phone_client: Any, tmp_path: Path) -> None:
    phone = phone_client.Phone(manifest)
    app = phone_client.flower_app(lambda _: phone, lambda context: samples(int(context.node_config["partition-id"])))
    node = LoopbackNode(app, {"partition-id": 1, "num-partitions": 2})
    run(Loopback({1: library_node(0, "full"), 2: node}), tmp_path / "run")
    records = read_records(tmp_path / "run" / "records.jsonl")
    assert [[p.tier for p in record.participants] for record in records] == [["full", "1/4"]] * 2
    assert [record.dropped for record in records] == [[], []]
    run(Loopback({1: library_node(0, "full"), 2: library_node(1, "1/4")}), tmp_path / "torch")
    for record, other in zip(records, read_records(tmp_path / "torch" / "records.jsonl"), strict=True):
        for tier, metrics in other.metrics.items():  # its batches are drawn in another order
            assert record.metrics[tier].loss == pytest.approx(metrics.loss, rel=0.1)


def test_a_task_of_another_tier_costs_that_update_only(manifest: Path, phone_client: Any, tmp_path: Path) -> None:
    values = json.loads(manifest.read_text())
    values["work"], values["tier"] = "nested", "full"
    broken = tmp_path / manifest.name
    shutil.copy(manifest.with_suffix(".pte"), tmp_path)
    broken.write_text(json.dumps(values))
    phone = phone_client.Phone(broken)
    app = phone_client.flower_app(lambda _: phone, lambda _: samples(1))
    node = LoopbackNode(app, {"partition-id": 1, "num-partitions": 2})
    run(Loopback({1: library_node(0, "full"), 2: node}), tmp_path / "run")
    for record in read_records(tmp_path / "run" / "records.jsonl"):
        (dropped,) = record.dropped
        assert dropped["client"] == 1
        assert "do not fit the graph of tier full: " in dropped["reason"]


CLIENT_APP = '''
"""A phone has its manifest in the node config. It loads neither fedhm nor a model."""

import sys

import torch
from flwr.clientapp import ClientApp

from phones import phone_client

app = ClientApp()


def samples(context):
    number = int(context.node_config["partition-id"])
    inputs = torch.randn(20, 12, generator=torch.Generator().manual_seed(number))
    return inputs, inputs[:, :3].argmax(dim=1)


def answer(message, context):
    if int(context.node_config["partition-id"]) == 1:
        phone = phone_client.flower_app(lambda _: phone_client.Phone("MANIFEST"), samples)
        reply = phone(message, context)
        assert "phones.task" not in sys.modules
        assert "fedhm" not in sys.modules or not ALONE
        return reply
    from fedhm.flower import client_app
    from phones.task import build_model

    return client_app(build_model, samples)(message, context)


ALONE = "fedhm" not in sys.modules  # a process that starts many of them has it already
app.query()(answer)
app.train()(answer)
'''
SERVER_APP = """
from fedhm.flower import server_app
from phones.task import build_model, test_data

app = server_app(build_model, test_data, 3)
"""
TASK = """
import torch
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def test_data():
    inputs = torch.randn(20, 12, generator=torch.Generator().manual_seed(9))
    return inputs, inputs[:, :3].argmax(dim=1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_deployment_with_one_node_without_a_model(manifest: Path, tmp_path: Path) -> None:
    app = tmp_path / "app"
    shutil.copytree(Path(__file__).parent / "apps" / "methods", app, ignore=shutil.ignore_patterns("several"))
    text = (app / "pyproject.toml").read_text().replace("several.", "phones.")
    text = text[: text.index("[tool.flwr.app.config]")] + "[tool.flwr.app.config]\nout = ''\n"
    for key, value in SETTINGS.items():
        text += f"{key} = {json.dumps(value)}\n"
    (app / "pyproject.toml").write_text(text.replace("engine.patience = 0.0", "engine.patience = 120.0"))
    package = app / "phones"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "client_app.py").write_text(CLIENT_APP.replace("MANIFEST", str(manifest)))
    (package / "server_app.py").write_text(SERVER_APP)
    (package / "task.py").write_text(TASK)
    shutil.copy(EXAMPLES / "phone_client.py", package)
    out = tmp_path / "run"
    with Up(tmp_path / "federation", 2, "--tiers", "full", "1/4") as up:
        up.wait()
        connection = connection_of(str(up.folder))
        run_id = start_run(connection, app, {"out": str(out)})
        wait_until((out / "report.md").exists, 500)
        wait_until(lambda: run_status(connection, run_id) == "finished:completed", 60)
    records = read_records(out / "records.jsonl")
    assert [[p.tier for p in record.participants] for record in records] == [["full", "1/4"]] * 2
    assert [record.dropped for record in records] == [[], []]
