"""Runs of a network with an embedding and an LSTM: every way through the server, checkpoints, files and exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhm
from fedhm.lowrank.hybrid import plan_of

pytestmark = pytest.mark.filterwarnings("ignore::fedhm.errors.FedhmWarning")
FACTORIZED = {"words", "layers.weight_ih_l0", "layers.weight_hh_l0"}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 12)
        self.layers = nn.LSTM(12, 16, batch_first=True)
        self.fc = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.layers(self.words(tokens))[0][:, -1])
        return scores


def model() -> Tagger:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tagger()


def clients(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """The class is that of the last word."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randint(0, 40, (count, 24, 6), generator=drawn)
    return [(each, each[:, -1] % 3) for each in x]


def run(out: Path | None = None, method: dict[str, Any] | None = None, **sections: Any) -> fedhm.Result:
    settings: dict[str, Any] = {
        "method": {"name": "fedhm", "tiers": [1, "1/4"], **(method or {})},
        "train": {"rounds": 2, "batch": 8, "lr": 0.2},
        "federation": {"participation": 1.0},
        "engine": {"workers": 1, "threads": 1},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return fedhm.run(model(), clients(), clients(1)[0], settings, out, progress=False)


@pytest.mark.parametrize(
    ("method", "sections"),
    [
        ({}, {}),
        ({"aggregate": "models"}, {}),
        ({"aggregate": "updates", "start": "smallest"}, {}),
        ({"aggregate": "factors", "tiers": ["1/4"]}, {}),
        ({"warmup": 1}, {}),
        ({"tiers": [1, "parameters:1.5k"], "replan": [1]}, {}),
        ({"tiers": ["60%", "30%"]}, {}),
        ({}, {"server": {"optimizer": "momentum"}}),
        ({}, {"server": {"robust": "median"}}),
        ({}, {"server": {"robust": "centered-clip"}}),
        ({}, {"evaluation": {"diagnostics": "theory"}}),
        ({"aggregate": "updates"}, {"privacy": {"noise": 0.1, "clip": 1.0}, "train": {"masked_loss": False}}),
        ({}, {"train": {"optimizer": "adamw", "lr": 0.01}}),
        ({}, {"train": {"frobenius_decay": 1e-3}}),
    ],
    ids=str,
)
def test_every_way_through_the_server(method: dict[str, Any], sections: dict[str, Any]) -> None:
    result = run(None, method, **sections)
    smallest = list(result.networks)[-1]
    assert plan_of(result.networks[smallest]).keys() == FACTORIZED
    assert all(torch.isfinite(p).all() for p in result.networks[smallest].parameters())
    assert not any(record.dropped for record in result.records)


def test_all_tiers_learn() -> None:
    result = run(train={"rounds": 25, "epochs": 3}, evaluation={"every": 25})
    assert min(metrics.accuracy for metrics in result.metrics.values()) > 0.6


@pytest.mark.parametrize(
    "method", [{"name": "fedavg", "tier": "1/4"}, {"name": "feddlr"}, {"name": "fedpara"}], ids=str
)
def test_other_methods_take_the_same_network(method: dict[str, Any]) -> None:
    settings = {"method": method, "train": {"rounds": 2, "batch": 8, "lr": 0.2}}
    if method["name"] == "fedpara":  # it composes neither embeddings nor recurrent layers
        with pytest.raises(fedhm.FedhmError, match=r"a LSTM, which FedPara does not compose"):
            fedhm.run(model(), clients(), clients(1)[0], settings)
        return
    result = fedhm.run(model(), clients(), clients(1)[0], settings)
    assert len(result.records) == 2


def test_a_run_is_read_back_and_resumed(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", train={"rounds": 3})
    folder = tmp_path / "parts"
    run(folder, train={"rounds": 3})
    again = run_from(folder, 2)
    for tier, network in whole.networks.items():
        loaded = fedhm.load_tier(folder / "models" / f"{tier.replace('/', '-')}.safetensors", model(), tier)
        for name, tensor in network.state_dict().items():
            assert torch.equal(again.networks[tier].state_dict()[name], tensor)
            assert torch.equal(loaded.state_dict()[name], tensor)


def run_from(folder: Path, round_number: int) -> fedhm.Result:
    settings = {
        "method": {"name": "fedhm", "tiers": [1, "1/4"]},
        "train": {"rounds": 3, "batch": 8, "lr": 0.2},
        "federation": {"participation": 1.0},
        "engine": {"workers": 1, "threads": 1},
    }
    return fedhm.run(model(), clients(), clients(1)[0], settings, folder, from_round=round_number, progress=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_factorized_lstm_is_exported_and_checked(tmp_path: Path) -> None:
    network = run().networks["1/4"]
    exported = fedhm.export(network, (6,), samples=clients(1)[0], out=tmp_path)
    assert exported.path.exists()
