"""The server side of an app, on nodes in this process: tiers by node configs, folders, errors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

import fedhm
from fedhm.assembly import design
from fedhm.config.loading import parse_flat
from fedhm.config.schema import Config
from fedhm.data.federation import Federation, remote_federation
from fedhm.data.samples import Preprocessing
from fedhm.errors import FedhmError
from fedhm.flower import client_app, server_app
from fedhm.flower.clients import UserModel
from fedhm.flower.server import run_on_grid
from fedhm.runs.folder import read_config
from fedhm.runs.rounds import read_records
from fedhm.server.filters.fleet import TierWork
from flower_loopback import Loopback, LoopbackNode
from run_outcome import weights

pytestmark = pytest.mark.usefixtures("without_figures")
SETTINGS = {
    "federation.clients": 3,
    "federation.participation": 1.0,
    "train.rounds": 2,
    "train.batch": 8,
    "train.lr": 0.05,
    "method.tiers": "[1, 1/4, 1/16]",
    "method.keep": 0,
    "engine.patience": 0.0,
    "engine.threads": 1,
    "engine.server_threads": 1,
}


def build_model(width: int = 128) -> nn.Module:
    return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def build_large_model() -> nn.Module:
    """Return a model whose every tier takes some MiB in training."""
    return build_model(1024)


def samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(20, 12, generator=torch.Generator().manual_seed(number))
    return inputs, inputs[:, :3].argmax(dim=1)


def node(client: int, build: Callable[[], nn.Module] = build_model, **config: str | int) -> LoopbackNode:
    app = client_app(build, lambda context: samples(int(context.node_config["partition-id"])))
    return LoopbackNode(app, {"partition-id": client, "num-partitions": 3, **config})


def run(
    grid: Loopback, out: Path | None = None, build: Callable[[], nn.Module] = build_model, **changes: object
) -> None:
    config = parse_flat({**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}}, "test")
    run_on_grid(grid, config, UserModel(build, 0), federation, out, [])


def federation(sizes: tuple[int, ...], _: str) -> Federation:
    return remote_federation(samples(9), 3, sizes, Preprocessing())


def assigned(out: Path) -> tuple[str, ...]:
    return read_config(out).federation.assignment


def test_without_node_configs_tiers_go_by_number(tmp_path: Path) -> None:
    run(Loopback({1: node(0), 2: node(1), 3: node(2)}), tmp_path / "run")
    assert assigned(tmp_path / "run") == ()
    tiers = [p.tier for p in read_records(tmp_path / "run" / "records.jsonl")[0].participants]
    assert tiers == ["full", "1/4", "1/16"]


def test_a_node_config_names_the_tier_and_the_others_go_by_number(tmp_path: Path) -> None:
    run(Loopback({1: node(0, tier="1/16"), 2: node(1), 3: node(2, tier="full")}), tmp_path / "run")
    assert assigned(tmp_path / "run") == ("1/16", "1/4", "full")
    tiers = [p.tier for p in read_records(tmp_path / "run" / "records.jsonl")[0].participants]
    assert tiers == ["1/16", "1/4", "full"]


@pytest.mark.slow
def test_memory_gives_the_largest_tier_that_fits(tmp_path: Path) -> None:
    config = parse_flat(SETTINGS, "test")
    room = {tier: -(-memory(config, tier) >> 20) for tier in ("full", "1/4", "1/16")}  # in whole MiB
    assert room["full"] > room["1/4"] > room["1/16"]
    asked = [room["1/4"], room["full"] + 100, room["1/16"]]
    nodes = {number: node(number, build_large_model, memory=asked[number]) for number in range(3)}
    run(Loopback(nodes), tmp_path / "run", build_large_model, train__rounds=1)
    assert assigned(tmp_path / "run") == ("1/4", "full", "1/16")


def memory(config: Config, tier: str) -> int:
    built = design(config, UserModel(build_large_model, 0).build(), torch.zeros(1, 12), 3)
    return TierWork(built.method, built.model, config, (12,)).memory(tier)


@pytest.mark.slow
def test_a_client_without_a_possible_tier_takes_no_part(tmp_path: Path) -> None:
    wishes = ({"tier": "1/3"}, {}, {"memory": 1})
    nodes = {1 + number: node(number, build_large_model, **wish) for number, wish in enumerate(wishes)}
    run(Loopback(nodes), tmp_path / "run", build_large_model)
    assert assigned(tmp_path / "run") == ("1/16", "1/4", "1/16")
    for record in read_records(tmp_path / "run" / "records.jsonl"):
        reasons = {each["client"]: each["reason"] for each in record.dropped}
        assert reasons[0] == "it asks for tier '1/3', known are full, 1/4, 1/16"
        assert reasons[2].startswith("it can spare 1 MiB, but training even tier 1/16 takes ")
        assert set(reasons) == {0, 2}


def test_dynamic_tiers_are_drawn_whatever_the_nodes_say(tmp_path: Path) -> None:
    nodes = {number: node(number, tier="1/16") for number in range(3)}
    run(Loopback(nodes), tmp_path / "run", federation__heterogeneity="dynamic")
    assert assigned(tmp_path / "run") == ()


@pytest.mark.parametrize(
    ("nodes", "changes", "sentence"),
    [
        (
            [],
            {"federation__min_clients": 3},
            r"1 of 3 clients did not connect within 0 s \(engine.patience\), and a run begins with at least 3 "
            r"\(federation.min_clients\): no SuperNode has partition-id 0",
        ),
        ([node(0)], {"method__keep": 9}, "there is nothing to factorize"),
    ],
)
def test_errors_are_one_sentence(nodes: list[LoopbackNode], changes: dict[str, object], sentence: str) -> None:
    grid = Loopback({1: node(1), 2: node(2), **{3 + number: each for number, each in enumerate(nodes)}})
    with pytest.raises(FedhmError, match=sentence):
        run(grid, **changes)


def test_a_resumed_run_keeps_its_tiers(tmp_path: Path) -> None:
    out = tmp_path / "run"
    grid = Loopback({1: node(0, tier="1/16"), 2: node(1, tier="1/16"), 3: node(2, tier="1/4")})
    grid.nodes[2].app = Failing(grid.nodes[2].app, 2)  # type: ignore[assignment]
    with pytest.raises(
        FedhmError, match=r"in round 2, 2 of 3 in attempt 1 of 1: of client 1, its ClientApp raised an exception: tired"
    ):
        run(grid, out, federation__min_updates=3, federation__attempts=1)
    assert len(read_records(out / "records.jsonl")) == 1
    grid.nodes = {7: node(0), 8: node(1), 9: node(2)}  # started anew, without their tiers
    run(grid, out, federation__min_updates=3, federation__attempts=1)
    whole = tmp_path / "whole"
    grid = Loopback({1: node(0, tier="1/16"), 2: node(1, tier="1/16"), 3: node(2, tier="1/4")})
    run(grid, whole, federation__min_updates=3, federation__attempts=1)
    for path in (whole / "models").iterdir():
        assert weights(path) == weights(out / "models" / path.name)
    with pytest.raises(FedhmError, match="holds a run with other settings"):
        run(grid, out, train__lr=0.01)


class Failing:
    """An app that does its first tasks and then fails."""

    def __init__(self, app: object, tasks: int) -> None:
        self._app, self._left = app, tasks

    def __call__(self, *arguments: object) -> object:
        self._left -= 1
        if self._left < 0:
            raise ValueError("tired")
        return self._app(*arguments)  # type: ignore[operator]


def test_an_app_reads_its_settings_from_the_run_config(tmp_path: Path) -> None:
    app = server_app(build_model, lambda: samples(9), 3)
    grid = Loopback({1: node(0), 2: node(1), 3: node(2)})
    app(grid, context({**SETTINGS, "out": str(tmp_path / "run"), "my-own-key": 3}))
    assert read_config(tmp_path / "run").train.rounds == 2
    assert (tmp_path / "run" / "report.md").exists()
    with pytest.raises(FedhmError, match=r"the run config: unknown key 'train\.round', did you mean 'train\.rounds'"):
        app(grid, context({**SETTINGS, "train.round": 3}))


def context(run_config: dict[str, object]) -> object:
    return Context(1, 1, {}, RecordDict(), run_config)  # type: ignore[arg-type]


def test_regression_with_server_momentum_equals_the_local_engine(tmp_path: Path) -> None:
    """Regression, AdamW at the clients and momentum at the server: an app and `fedhm.run` end in the same weights."""

    def predicted(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, _ = samples(number)
        return inputs, inputs[:, :2] @ torch.tensor([[1.0, 0.5, 0.0], [0.0, -1.0, 2.0]])

    def one(client: int) -> LoopbackNode:
        app = client_app(build_model, lambda context: predicted(int(context.node_config["partition-id"])))
        return LoopbackNode(app, {"partition-id": client, "num-partitions": 3})

    settings = {
        **SETTINGS,
        "objective.name": "regression",
        "train.optimizer": "adamw",
        "train.lr": 0.001,
        "server.optimizer": "momentum",
    }
    config = parse_flat(settings, "test")
    own = UserModel(build_model, 0)
    grid = Loopback({1: one(0), 2: one(1), 3: one(2)})
    out = tmp_path / "run"
    run_on_grid(
        grid,
        config,
        own,
        lambda sizes, _: remote_federation(predicted(9), 3, sizes, Preprocessing(), objective=config.objective),
        out,
        [],
    )
    here = fedhm.run(own.build(), [predicted(number) for number in range(3)], predicted(9), config)
    assert [record.metrics for record in read_records(out / "records.jsonl")] == [r.metrics for r in here.records]
    assert here.metrics["full"].keys() == {"r2", "mse"}
