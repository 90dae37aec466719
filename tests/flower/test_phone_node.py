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

from fedhm.assembly import read_federation
from fedhm.config.loading import load_config, parse_flat
from fedhm.config.registry import make
from fedhm.data.federation import Federation, remote_federation
from fedhm.data.samples import Preprocessing
from fedhm.export.training import TrainingSource, training_sources, write_training
from fedhm.flower import client_app
from fedhm.flower.clients import UserModel, config_client_app
from fedhm.flower.deployment import connection_of
from fedhm.flower.processes.superlink import run_status, start_run
from fedhm.flower.server import run_config_on_grid, run_on_grid
from fedhm.flower.wire import RunInfo
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


def run(grid: Loopback, out: Path, **changes: Any) -> None:
    run_on_grid(grid, parse_flat({**SETTINGS, **changes}, "test"), UserModel(build_model, 0), federation, out, [])


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


PRIVATE: dict[str, Any] = {
    "privacy.where": "client",
    "privacy.clip": 0.5,
    "privacy.noise": 2.0,
    "train.masked_loss": False,
    "train.max_change": 0.0,
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train.lr": 0.1}, "exported with train.lr = 0.05, and the server's run has 0.1: "),
        ({"train.epochs": 2}, "train.epochs = 1, and the server's run has 2"),
        ({"train.iterations": 7}, "train.iterations = 0, and the server's run has 7"),
        ({"train.batch": 9}, "train.batch = 8, and the server's run has 9"),
        ({"train.schedule": "cosine"}, 'train.schedule = "milestones", and the server\'s run has "cosine"'),
        ({"train.rounds": 3, "train.warmup_rounds": 2}, "train.warmup_rounds = 0, and the server's run has 2"),
        ({"train.milestones": "[1]"}, r"train.milestones = \[\], and the server's run has \[1\]"),
        ({"train.momentum": 0.5}, "train.momentum = 0.9, and the server's run has 0.5"),
        ({"train.weight_decay": 0.5}, "train.weight_decay = 0.0001, and the server's run has 0.5"),
        ({"train.masked_loss": False}, "train.masked_loss = true, and the server's run has false"),
        ({"train.optimizer": "adamw"}, 'train.optimizer = "sgd", and the server\'s run has "adamw"'),
        ({"objective.name": "regression"}, 'objective = {"name": "classification".*has {"name": "regression"'),
        (PRIVATE, "privacy.where = 'client', and .* does not clip its update or add noise"),
    ],
)
def test_a_run_with_other_settings_is_refused(
    manifest: Path, phone_client: Any, changes: dict[str, Any], sentence: str
) -> None:
    def terms(**more: Any) -> str:
        return RunInfo(parse_flat({**SETTINGS, **more}, "test").resolved(), 3, Preprocessing()).encode()["terms"]

    phone = phone_client.Phone(manifest)
    phone.check_run(terms())
    phone.check_run(terms(**{"train.rounds": 9, "engine.fp16": True, "train.max_change": 0.0}))  # no matter for it
    with pytest.raises(phone_client.PhoneError, match=sentence) as caught:
        phone.check_run(terms(**changes))
    assert "\n" not in str(caught.value)


def test_a_phone_takes_no_part_where_clients_add_noise(
    manifest: Path, phone_client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phone = phone_client.Phone(manifest)
    node = LoopbackNode(
        phone_client.flower_app(lambda _: phone, lambda _: samples(1)), {"partition-id": 1, "num-partitions": 2}
    )
    run(Loopback({1: library_node(0, "full"), 2: node}), tmp_path / "run", **PRIVATE)
    records = read_records(tmp_path / "run" / "records.jsonl")
    for record in records:
        (dropped,) = record.dropped
        assert dropped["client"] == 1
        assert "the run has privacy.where = 'client'" in dropped["reason"]
    assert "client 1 takes no part: the run has privacy.where = 'client'" in capsys.readouterr().out


def test_phones_alone_train_a_network_with_batch_norm(phone_client: Any, tmp_path: Path) -> None:
    """With the default settings running averages do not travel: phones gather the statistics of their tier."""
    changes = ["model.width=0.25", "federation.clients=2", "federation.participation=1.0", "method.tiers=[1, 1/8]"]
    changes += ["train.rounds=2", "evaluation.every=1", "data.train_samples=80", "engine.name=flower"]
    config = load_config("digits", [*changes, "engine.patience=0.0", "engine.threads=1", "engine.server_threads=1"])
    config = config.resolved()
    clients = read_federation(config).clients

    def own(context: Any) -> tuple[Tensor, Tensor]:
        part = clients[int(context.node_config["partition-id"])]
        return part.tensor.contiguous(), part.labels

    phones = [phone_client.Phone(write_training(s, tmp_path / "files").manifest) for s in training_sources(config)]

    def phone_of(context: Any) -> Any:
        return phones[int(context.node_config["partition-id"])]

    found = {}
    for name, app in {"phones": phone_client.flower_app(phone_of, own), "library": config_client_app()}.items():
        nodes = {n + 1: LoopbackNode(app, {"partition-id": n, "num-partitions": 2}) for n in range(2)}
        run_config_on_grid(Loopback(nodes), config, tmp_path / name, [])
        found[name] = read_records(tmp_path / name / "records.jsonl")
    for record, other in zip(found["phones"], found["library"], strict=True):
        assert [p.tier for p in record.participants] == ["full", "1/8"]
        # each gathers the statistics of its own tier only
        assert {(each["kind"], each["client"]) for each in record.dropped} == {("statistics", 0), ("statistics", 1)}
        assert "has a graph of tier" in record.dropped[0]["reason"]
        for tier, metrics in other.metrics.items():  # its batches are drawn in another order
            assert record.metrics[tier].loss == pytest.approx(metrics.loss, rel=0.2)


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
