"""Nodes read lazy data sets as the local engine does: the same random transforms, and the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedhm
from fedhm.config.loading import parse_flat
from fedhm.data.federation import Federation, remote_federation
from fedhm.data.samples import Preprocessing
from fedhm.flower import client_app
from fedhm.flower.clients import UserModel
from fedhm.flower.server import run_on_grid
from flower_loopback import Loopback, LoopbackNode
from run_outcome import weights

pytestmark = pytest.mark.usefixtures("without_figures")
SETTINGS: dict[str, dict[str, Any]] = {
    "federation": {"participation": 1.0},
    "train": {"rounds": 2, "batch": 8, "lr": 0.05},
    "method": {"tiers": [1, "1/4"], "keep": 0},
    "engine": {"threads": 1, "server_threads": 1},
}


class Noisy(Dataset[Any]):
    def __init__(self, seed: int) -> None:
        self.x = torch.randn(20, 12, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index] + 0.1 * torch.randn(12), int(self.x[index, :3].argmax())


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def test_the_weights_are_those_of_the_local_engine(tmp_path: Path) -> None:
    test = (torch.randn(9, 12), torch.arange(9) % 3)

    def federation(sizes: tuple[int, ...], _: str) -> Federation:
        return remote_federation(test, 3, sizes, Preprocessing())

    app = client_app(build_model, lambda context: Noisy(int(context.node_config["partition-id"])))
    nodes = {1 + n: LoopbackNode(app, {"partition-id": n, "num-partitions": 2}) for n in range(2)}
    flat = {f"{section}.{key}": value for section, own in SETTINGS.items() for key, value in own.items()}
    flat |= {"federation.clients": 2, "engine.patience": 0.0, "method.tiers": "[1, 1/4]"}
    model = UserModel(build_model, 0)
    run_on_grid(Loopback(nodes), parse_flat(flat, "test"), model, federation, tmp_path / "flower", [])
    fedhm.run(model.build(), [Noisy(0), Noisy(1)], test, SETTINGS, tmp_path / "local")
    for path in (tmp_path / "local" / "models").iterdir():
        assert weights(path) == weights(tmp_path / "flower" / "models" / path.name)
