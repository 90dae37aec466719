"""Nodes evaluate on test samples of their own, in as few messages as can be, and are held to their word."""

from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import fedhm
from fedhm.config.reading import parse_flat
from fedhm.data.batches import Preprocessing
from fedhm.errors import FedhmError
from fedhm.flower import client_app, server_app
from fedhm.flower.grid_engine import FlowerEngine
from fedhm.flower.models import OwnModel
from fedhm.flower.nodes import Node, Roster
from fedhm.flower.wire import Terms, greeting
from fedhm.runs.records import read_records
from fedhm.work.messages import Failure, Task, Update
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
    model = OwnModel(build_model, 0).build()
    here = fedhm.run(model, [samples(n) for n in range(3)], samples(9), config, client_test=0.25)
    assert [record.clients for record in records] == [record.clients for record in here.records]
    assert records[-1].clients["full"].overall.samples == 15
    # a round trains and gathers statistics at one client, and evaluates at three: both tiers in one message
    exchanges = [message.metadata.message_type for message in grid.pushed].count("train")
    assert exchanges == 2 * (1 + 1 + 3)


@pytest.mark.slow
def test_nodes_that_bring_test_samples_need_not_be_asked_for_them(tmp_path: Path) -> None:
    grid = grid_of(*[client_app(build_model, own, test=own_test)] * 2, client_app(build_model, own))
    (*_, last) = served(grid, tmp_path / "run")
    assert [(one.client, one.samples) for one in last.clients["1/4"].each] == [(0, 6), (1, 6)]
    assert last.dropped == []
    assert last.evaluation.up > 0


def test_a_node_is_held_to_the_test_samples_that_it_said_it_has() -> None:
    grid = grid_of(client_app(build_model, own, test=own_test), client_app(build_model, own, test=own_test))
    config = parse_flat({"federation.clients": 2, "method.name": "fedavg", "engine.threads": 1}, "test").resolved()
    terms = Terms(config, 3, Preprocessing())
    roster = Roster(grid, 2, greeting(terms), print)
    roster.refresh()
    assert roster.introduced()[0] == Node(0, 20, tests=6)
    engine = FlowerEngine(grid, roster, terms, 0.0, fp16=False)
    grid.nodes[2].app = client_app(build_model, own, test=lambda _: samples(7, 5))
    weights = {n: t for n, t in build_model().state_dict().items() if t.is_floating_point()}
    tasks = [Task("evaluate", 1, client, "full", "full", weights, options={"batch": 8.0}) for client in (0, 1)]
    honest, other = sorted(engine.run(tasks), key=lambda reply: reply.position)
    assert isinstance(honest, Update)
    assert honest.samples == 6
    assert isinstance(other, Failure)
    assert other.reason == "it claims 5 test samples, but said that it has 6"


@pytest.mark.parametrize("tests", [-1, 2.5, True, "many"])
def test_a_node_that_claims_what_cannot_be_is_not_used(tests: object) -> None:
    content = Node(0, 20).introduction()
    content.config_records["fedhm"]["tests"] = tests  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"wrong types|-1 test samples"):
        Node.read(content)


@pytest.mark.slow
def test_a_server_needs_no_test_samples(tmp_path: Path) -> None:
    """All that it is told of the samples is the shape of an input; the model tells how many classes there are."""
    app = server_app(build_model, inputs=(12,))
    grid = grid_of(*[client_app(build_model, own)] * 3)
    app(grid, Context(1, 1, {}, RecordDict(), {**SETTINGS, "out": str(tmp_path / "run")}))  # type: ignore[arg-type]
    records = read_records(tmp_path / "run" / "records.jsonl")
    model = OwnModel(build_model, 0).build()
    here = fedhm.run(model, [samples(n) for n in range(3)], config=parse_flat(SETTINGS, "test"))
    assert [record.metrics for record in records] == [record.metrics for record in here.records]
    with pytest.raises(FedhmError, match=r"must be told the shape of an input: inputs=\(3, 32, 32\)"):
        server_app(build_model)(grid, Context(1, 1, {}, RecordDict(), SETTINGS))  # type: ignore[arg-type]
