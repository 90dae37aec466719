"""A frozen base with BatchNorm keeps its statistics: they are not trained, gathered or sent."""

import pytest
import torch
from torch import Tensor, nn

import fedhm
from fedhm.config.loading import parse
from fedhm.data.federation import from_arrays
from fedhm.networks.exchange import exchanged_tensors
from tiny_transformers import needs_peft

pytestmark = [pytest.mark.slow, needs_peft]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return out


def normed() -> Normed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Normed()
    model.norm.running_mean.fill_(0.25)
    model.norm.running_var.fill_(4.0)
    return model


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 3 + torch.randn(count, 6, generator=generator), torch.arange(count) % 3


@pytest.mark.parametrize("name", ["lora", "flora", "homolora"])
def test_statistics_of_a_frozen_base_stay_and_nothing_of_them_is_sent(name: str) -> None:
    own = {"rank": 2} if name == "homolora" else {"ranks": [4, 2]}
    settings = {
        "method": {"name": name, "target": ["first"], "head": ["last"], **own},
        "train": {"rounds": 2, "batch": 6, "lr": 0.1, "optimizer": "adamw"},
        "federation": {"participation": 1.0, "clients": 3},
        "engine": {"workers": 1, "threads": 1},
    }
    clients, test = [samples(12, seed) for seed in range(3)], samples(12, 9)
    method = fedhm.assemble(normed(), from_arrays(clients, test), parse(settings, "test")).method
    sent = {
        tensor.rpartition(".")[0]
        for tier in method.tiers
        for tensor in exchanged_tensors(method.network(method.spec(tier)))
    }
    assert sent == {"first", "last"}
    run = fedhm.run(normed(), clients, test, settings)
    for network in run.networks.values():
        (norm,) = [module for module in network.modules() if isinstance(module, nn.BatchNorm1d)]
        assert norm.running_mean.eq(0.25).all()
        assert norm.running_var.eq(4.0).all()
        adapter = next(t for tensor, t in network.named_parameters() if "lora_B" in tensor)
        assert adapter.any() or name == "flora"  # there it is merged into the base, and begins anew
    assert all(record.statistics.answers == 0 and record.statistics.down == 0 for record in run.records)
