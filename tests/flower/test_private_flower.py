"""Private runs on Flower: the same noise as with the local engine, and nodes that add their own."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fedhm
from fedhm.config.loading import parse_flat
from fedhm.data.federation import Federation, remote_federation
from fedhm.data.samples import Preprocessing
from fedhm.errors import FedhmError
from fedhm.flower import client_app
from fedhm.flower.clients import UserModel
from fedhm.flower.server import run_on_grid
from fedhm.runs.privacy import LENGTH
from fedhm.runs.rounds import read_records
from flower_loopback import Loopback, LoopbackNode
from run_outcome import weights

SETTINGS: dict[str, object] = {
    "federation.clients": 3,
    "federation.participation": 0.7,
    "train.rounds": 2,
    "train.batch": 8,
    "train.lr": 0.05,
    "train.masked_loss": False,
    "train.on_bad_update": "drop",
    "method.tiers": "[1, 1/4]",
    "method.keep": 0,
    "method.aggregate": "updates",
    "privacy.clip": 0.5,
    "privacy.noise": 2.0,
    "engine.patience": 0.0,
    "engine.threads": 1,
    "engine.server_threads": 1,
}
pytestmark = pytest.mark.usefixtures("without_figures")


def build_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(20, 12, generator=torch.Generator().manual_seed(number))
    return inputs, inputs[:, :3].argmax(dim=1)


def node(client: int, privacy: dict[str, float] | None = None) -> LoopbackNode:
    own = client_app(build_model, lambda c: samples(int(c.node_config["partition-id"])), privacy=privacy)
    return LoopbackNode(own, {"partition-id": client, "num-partitions": 3})


def federation(sizes: tuple[int, ...], _: str) -> Federation:
    return remote_federation(samples(9), 3, sizes, Preprocessing())


def run(grid: Loopback, out: Path, **changes: object) -> None:
    config = parse_flat({**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}}, "test")
    run_on_grid(grid, config, UserModel(build_model, 0), federation, out, [])


def grid(privacy: dict[str, float] | None = None) -> Loopback:
    return Loopback({number + 1: node(number, privacy) for number in range(3)})


@pytest.fixture(autouse=True)
def _known_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedhm.runs.privacy.new_secret", lambda: b"k" * LENGTH)


def test_the_servers_noise_equals_that_of_the_local_engine(tmp_path: Path) -> None:
    run(grid(), tmp_path / "flower")
    table: dict[str, dict[str, object]] = {}
    for key, value in SETTINGS.items():
        section, _, name = key.partition(".")
        table.setdefault(section, {})[name] = ["1", "1/4"] if name == "tiers" else value
    fedhm.run(build_model(), [samples(number) for number in range(3)], samples(9), table, tmp_path / "local")
    for tier in ("full", "1-4"):
        name = f"models/{tier}.safetensors"
        assert weights(tmp_path / "flower" / name) == weights(tmp_path / "local" / name)
    epsilons = [[r.epsilon for r in read_records(tmp_path / n / "records.jsonl")] for n in ("flower", "local")]
    assert epsilons[0] == epsilons[1]
    assert epsilons[0][0] is not None


def test_the_secret_goes_to_no_node(tmp_path: Path) -> None:
    there = grid()
    run(there, tmp_path / "run")
    notes = [json.dumps(dict(message.content.config_records["fedhm"]), default=str) for message in there.pushed]
    assert notes
    assert not any("kkkkkkkk" in note or (b"k" * 8).hex() in note for note in notes)


def test_nodes_add_their_own_noise(tmp_path: Path) -> None:
    local = {"privacy__where": "client", "train__max_change": 0}
    for name in ("first", "second"):
        run(grid(), tmp_path / name, **local)
    models = [(tmp_path / name / "models" / "full.safetensors").read_bytes() for name in ("first", "second")]
    assert models[0] != models[1]  # nobody but the node knows its noise, so no run repeats it
    records = read_records(tmp_path / "first" / "records.jsonl")
    assert all(traffic.loss == 0 for record in records for traffic in record.traffic.values())
    assert records[-1].epsilon is not None
    assert not records[-1].dropped


def test_a_node_with_pinned_noise_adds_it_whatever_its_server_says(tmp_path: Path) -> None:
    open_run = {"privacy__clip": 0.0, "privacy__noise": 0.0, "train__max_change": 0, "train__masked_loss": False}
    run(grid({"clip": 0.5, "noise": 100.0}), tmp_path / "pinned", **open_run)
    run(grid(), tmp_path / "open", **open_run)
    pinned, bare = (
        fedhm.load_tier(tmp_path / name / "models" / "full.safetensors", build_model()) for name in ("pinned", "open")
    )
    away = torch.cat([(a - b).flatten() for a, b in zip(pinned.parameters(), bare.parameters(), strict=True)])
    assert away.std() > 5  # noise of 50, in the mean of two clients, twice
    with pytest.raises(FedhmError, match="privacy needs a clip and a noise larger than 0"):
        client_app(build_model, lambda _: samples(0), privacy={"clip": 1.0})
