"""`fedhm.run` with models and data that are not images in a ResNet."""

import pytest
import torch
from torch import Tensor, nn

import fedhm
from fedhm.errors import FedhmError


class Reader(nn.Module):
    """Reads tokens: an embedding tied to a decoder that is not used, a transformer, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.decoder = nn.Linear(16, 20, bias=False)
        self.decoder.weight = self.embed.weight
        self.encoder = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.1, batch_first=True)
        self.register_buffer("positions", torch.arange(6))
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(tokens + 0 * self.positions)).mean(1))
        return logits


def test_a_transformer_that_reads_tokens() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (240, 6))
    labels = (tokens[:, 0] + tokens[:, 1]) % 2 + (tokens[:, 2] > 15)
    clients = [(tokens[i:200:8], labels[i:200:8]) for i in range(8)]
    settings = {
        "train": {"rounds": 2, "batch": 8, "lr": 0.01},
        "method": {"tiers": [1, "1/4"], "keep": 0},
        "engine": {"threads": 1},
    }
    result = fedhm.run(Reader(), clients, (tokens[200:], labels[200:]), settings)
    assert result.costs["1/4"].parameters < result.costs["full"].parameters
    assert set(result.scores) == {"full", "1/4"}
    # 20 × 16 tied values travel once
    assert result.costs["full"].bytes == 4 * sum(p.numel() for p in Reader().parameters())
    full = result.networks["full"]
    assert isinstance(full, Reader)
    assert full.decoder.weight is full.embed.weight


def test_sections_of_a_config_file_that_do_not_apply_are_refused() -> None:
    with pytest.raises(FedhmError, match="the section 'data' is for runs from a config file"):
        fedhm.run(nn.Linear(2, 2), [], (torch.zeros(1, 2), torch.zeros(1)), {"data": {"source": "digits"}})


def test_watchers_are_told_of_every_task_and_round() -> None:
    heard: list[tuple[object, ...]] = []

    class Ear:
        def started(self, *what: object) -> None:
            heard.append(("started", *what))

        def task_done(self, *what: object) -> None:
            heard.append(what)

        def round_done(self, record: object) -> None:
            heard.append(("done", record))

    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    data = (torch.randn(10, 4), torch.arange(10) % 2)
    settings = {
        "train": {"rounds": 2},
        "method": {"tiers": [1, "1/4"]},
        "federation": {"participation": 1.0},
        "engine": {"threads": 1},
    }
    result = fedhm.run(model, [data] * 3, data, settings, watchers=[Ear()])
    assert heard[0] == ("started", 0, 2)
    assert heard[1:4] == [(1, "train", n, 3) for n in (1, 2, 3)]
    assert [entry[1] for entry in heard if entry[0] == "done"] == result.records
