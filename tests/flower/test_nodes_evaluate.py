"""Nodes evaluate on test samples of their own, in as few messages as possible. False sample counts are refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import fedhm
from fedhm.config.loading import parse_flat
from fedhm.data.samples import Preprocessing
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.flower import client_app, server_app
from fedhm.flower.clients import UserModel
from fedhm.flower.engine import FlowerEngine
from fedhm.flower.nodes import Node, NodeRegistry
from fedhm.flower.wire import RunInfo, introduction_request
from fedhm.networks.spec import NetworkSpec
from fedhm.runs.rounds import read_records
from fedhm.work.messages import Failure, Task, TaskOptions, Update
from flower_loopback import Loopback, LoopbackNode

SETTINGS = {
    "federation.clients": 3,
    "federation.participation": 0.34,
    "train.rounds": 2,
    "train.batch": 8,
    "method.tiers": "[1, 1/4]",
    "method.keep": 0,
    "engine.patience": 0.0,
    "engine.threads": 1,
    "engine.server_threads": 1,
}


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 3))


def samples(number: int, count: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(count, 12, generator=torch.Generator().manual_seed(number))
    return inputs, inputs[:, :3].argmax(dim=1)


def own(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    return samples(int(context.node_config["partition-id"]))


def own_test(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    return samples(50 + int(context.node_config["partition-id"]), 6)


def grid_of(*apps: ClientApp) -> Loopback:
    nodes = {n + 1: LoopbackNode(app, {"partition-id": n, "num-partitions": len(apps)}) for n, app in enumerate(apps)}
    return Loopback(nodes)


def served(grid: Loopback, out: Path, **options: float) -> list[fedhm.Record]:
    app = server_app(build_model, lambda: samples(9), 3, **options)  # type: ignore[arg-type]
    app(grid, Context(1, 1, {}, RecordDict(), {**SETTINGS, "out": str(out)}))  # type: ignore[arg-type]
    return read_records(out / "records.jsonl")


@pytest.mark.slow
def test_a_share_is_held_out_and_evaluated_as_with_the_local_engine(tmp_path: Path) -> None:
    grid = grid_of(*[client_app(build_model, own)] * 3)
    records = served(grid, tmp_path / "run", client_test=0.25)
    config = parse_flat(SETTINGS, "test")
    model = UserModel(build_model, 0).build()
    here = fedhm.run(model, [samples(n) for n in range(3)], samples(9), config, client_test=0.25)
    assert [record.clients for record in records] == [record.clients for record in here.records]
    assert records[-1].clients["full"].overall.samples == 15
    # a round trains and gathers statistics at one client, and evaluates at three: both tiers in one message
    exchanges = [message.metadata.message_type for message in grid.pushed].count("train")
    assert exchanges == 2 * (1 + 1 + 3)


@pytest.mark.slow
def test_nodes_with_test_samples_evaluate_without_being_asked(tmp_path: Path) -> None:
    grid = grid_of(*[client_app(build_model, own, test=own_test)] * 2, client_app(build_model, own))
    (*_, last) = served(grid, tmp_path / "run")
    assert [(one.client, one.samples) for one in last.clients["1/4"].each] == [(0, 6), (1, 6)]
    assert last.dropped == []
    assert last.evaluation.up > 0


def test_a_reply_with_another_number_of_test_samples_than_introduced_is_refused() -> None:
    grid = grid_of(client_app(build_model, own, test=own_test), client_app(build_model, own, test=own_test))
    config = parse_flat({"federation.clients": 2, "method.name": "fedavg", "engine.threads": 1}, "test").resolved()
    info = RunInfo(config, 3, Preprocessing())
    registry = NodeRegistry(grid, 2, introduction_request(info), print)
    registry.refresh()
    assert registry.connected()[0] == Node(0, 20, tests=6)
    engine = FlowerEngine(grid, registry, info, 0.0, fp16=False)
    grid.nodes[2].app = client_app(build_model, own, test=lambda _: samples(7, 5))
    weights = {n: t for n, t in build_model().state_dict().items() if t.is_floating_point()}
    tasks = [
        Task("evaluate", 1, client, "full", NetworkSpec("full"), weights, options=TaskOptions(batch=8))
        for client in (0, 1)
    ]
    honest, other = sorted(engine.run(tasks), key=lambda reply: reply.position)
    assert isinstance(honest, Update)
    assert honest.samples == 6
    assert isinstance(other, Failure)
    assert other.reason == "it claims 5 test samples, but said that it has 6"


@pytest.mark.parametrize("tests", [-1, 2.5, True, "many"])
def test_impossible_numbers_of_test_samples_are_refused(tests: object) -> None:
    content = Node(0, 20).encode()
    content.config_records["fedhm"]["tests"] = tests  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"wrong types|-1 test samples"):
        Node.decode(content)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"inputs": (12,)}, {}], ids=["given", "asks"])
def test_a_server_needs_no_test_samples(tmp_path: Path, options: dict[str, Any]) -> None:
    """The form of an input is given, or the clients are asked. The number of classes follows from the model."""
    app = server_app(build_model, **options)
    grid = grid_of(*[client_app(build_model, own)] * 3)
    app(grid, Context(1, 1, {}, RecordDict(), {**SETTINGS, "out": str(tmp_path / "run")}))  # type: ignore[arg-type]
    records = read_records(tmp_path / "run" / "records.jsonl")
    model = UserModel(build_model, 0).build()
    here = fedhm.run(model, [samples(n) for n in range(3)], config=parse_flat(SETTINGS, "test"))
    assert [record.metrics for record in records] == [record.metrics for record in here.records]


class NanForSome(nn.Sequential):
    """A model that gives NaN for samples with a large last number, in evaluation only."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = super().forward(inputs)
        return found if self.training else found.masked_fill(inputs[:, -1:] > 2, torch.nan)


def build_nan() -> nn.Module:
    return NanForSome(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 3))


def with_nan(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = samples(number)
    inputs[:, -1] = 3.0 if number == 1 else 0.0
    return inputs, labels


@pytest.mark.slow
def test_nan_at_a_client_warns_and_counts_as_with_the_local_engine(tmp_path: Path) -> None:
    out, first = tmp_path / "run", SETTINGS | {"train.rounds": 1}
    nodes = grid_of(*[client_app(build_nan, lambda context: with_nan(int(context.node_config["partition-id"])))] * 3)
    context = Context(1, 1, {}, RecordDict(), {**first, "out": str(out)})
    with pytest.warns(FedhmWarning) as on_flower:
        server_app(build_nan)(nodes, context)  # type: ignore[arg-type]
    model = UserModel(build_nan, 0).build()
    with pytest.warns(FedhmWarning) as here:
        result = fedhm.run(model, [with_nan(n) for n in range(3)], config=parse_flat(first, "test"))
    words = {str(each.message) for each in here}
    assert {str(each.message) for each in on_flower} == words
    assert all("tier full gives NaN or infinite values for test samples of clients" in each for each in words)
    (record,) = read_records(out / "records.jsonl")
    assert str(record.clients) == str(result.records[0].clients)  # NaN is no other than NaN here
    assert [math.isnan(one.metrics.loss) for one in record.clients["full"].each] == [False, True, False]
    assert math.isfinite(record.metrics["full"].loss)
    assert record.dropped == []


def lies_about_inputs(line: str) -> ClientApp:
    """Return an app that lies about its inputs and is honest otherwise."""
    honest, app = client_app(build_model, own), ClientApp()

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if reply.content.config_records["fedhm"]["inputs"]:
            reply.content.config_records["fedhm"]["inputs"] = line
        return reply

    app.train()(honest)
    return app


@pytest.mark.slow
@pytest.mark.parametrize("line", ["float32 7", "float32 268435456"])
def test_one_node_that_lies_about_its_inputs_changes_nothing(
    tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def metrics(name: str, *apps: ClientApp) -> list[object]:
        context = Context(1, 1, {}, RecordDict(), {**SETTINGS, "out": str(tmp_path / name)})
        server_app(build_model)(grid_of(*apps), context)  # type: ignore[arg-type]
        return [record.metrics for record in read_records(tmp_path / name / "records.jsonl")]

    honest = client_app(build_model, own)
    assert metrics("lied", lies_about_inputs(line), honest, honest) == metrics("honest", honest, honest, honest)
    assert f"client 0 says that its inputs are {line}; those of most are float32 12" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_keeps_the_form_of_its_inputs(tmp_path: Path) -> None:
    """Other clients, or other answers, change nothing."""
    honest, out = client_app(build_model, own), tmp_path / "run"
    context = Context(1, 1, {}, RecordDict(), {**SETTINGS, "out": str(out)})
    server_app(build_model)(grid_of(*[honest] * 3), context)  # type: ignore[arg-type]
    assert 'inputs = "float32 12"' in (out / "config.toml").read_text()
    last = sorted((out / "checkpoints").glob("*.safetensors"))[-1]
    last.unlink()
    grid = grid_of(*[lies_about_inputs("float32 7")] * 3)
    server_app(build_model)(grid, context)  # type: ignore[arg-type]
    assert last.exists()
    assert {RunInfo.decode(message.content).classes for message in grid.pushed} == {3}  # nobody was asked what it has


def test_a_private_run_asks_for_no_inputs() -> None:
    private = {**SETTINGS, "privacy.clip": 1.0, "privacy.noise": 1.0, "method.aggregate": "updates"}
    grid = grid_of(*[client_app(build_model, own)] * 3)
    with pytest.raises(
        FedhmError, match=r"clients would describe their inputs without noise; give the server their shape by inputs="
    ):
        server_app(build_model)(grid, Context(1, 1, {}, RecordDict(), private))  # type: ignore[arg-type]
    assert not grid.pushed


@pytest.mark.parametrize("inputs", [3, ["float32"], "float32 0", "anything"])
def test_the_form_of_inputs_in_an_introduction_is_checked(inputs: object) -> None:
    content = Node(0, 20).encode()
    content.config_records["fedhm"]["inputs"] = inputs  # type: ignore[assignment]
    with pytest.raises((ValueError, FedhmError), match=r"wrong types|is no input spec"):
        Node.decode(content)
