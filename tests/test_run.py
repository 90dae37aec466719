"""`fedhm.run` with models and data that are not images in a ResNet."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedhm
from fedhm.errors import FedhmError
from fedhm.networks.inputs import probe_model
from fedhm.runs.folder import read_config


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
    assert set(result.metrics) == {"full", "1/4"}
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
        "train": {"rounds": 2, "nested": 0},
        "method": {"tiers": [1, "1/4"]},
        "federation": {"participation": 1.0},
        "engine": {"threads": 1},
    }
    result = fedhm.run(model, [data] * 3, data, settings, watchers=[Ear()])
    assert heard[0] == ("started", 0, 2)
    assert heard[1:4] == [(1, "train", n, 3) for n in (1, 2, 3)]
    assert [entry[1] for entry in heard if entry[0] == "done"] == result.records


class HeadFirst(nn.Module):
    """Defines its classifier before the layers that feed it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 3)
        self.body = nn.Linear(8, 64)
        self.neck = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.neck(self.body(x).relu()).relu())
        return scores


class ConvHead(nn.Module):
    """Scores from a 1×1 convolution over a volume, averaged; no Linear classifier at all."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.Conv3d(1, 8, 3, padding=1)
        self.hidden = nn.Linear(8, 32)
        self.neck = nn.Linear(32, 8)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.volume(x.reshape(-1, 1, 2, 2, 2)).mean((2, 3, 4))
        scores: Tensor = self.head(self.neck(self.hidden(seen))[:, :, None, None]).mean((2, 3))
        return scores


class TiedHead(nn.Module):
    """Its classifier is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 64)
        self.neck = nn.Linear(64, 16)
        self.embed = nn.Linear(16, 3, bias=False)
        self.head = nn.Linear(16, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.neck(self.project(x).relu()))
        return scores


def vectors() -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Six clients, none of which holds all three labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(180, 8, generator=generator)
    y = x[:, :3].argmax(1)
    clients = [(x[:150][y[:150] != lacking], y[:150][y[:150] != lacking]) for lacking in (0, 1, 2, 0, 1, 2)]
    return clients, (x[150:], y[150:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [HeadFirst, ConvHead, TiedHead])
def test_models_of_any_build_learn_where_labels_are_missing(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    clients, test = vectors()
    settings = {
        "train": {"rounds": 6, "batch": 16, "lr": 0.1, "epochs": 2},
        "evaluation": {"every": 6},
        "method": {"tiers": [1, "1/4"], "keep": 0},
        "federation": {"participation": 1.0},
        "engine": {"threads": 1},
    }
    model = kind()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = fedhm.run(model, clients, test, settings)
    assert min(score.accuracy for score in result.metrics.values()) > 0.6
    after = result.networks["full"].state_dict()
    assert all((after[name] != before[name]).any(-1).all() for name in before if name.endswith("weight")), (
        "untrained rows"
    )


def test_the_layer_that_gives_the_scores_is_found_by_what_it_does() -> None:
    batch = torch.randn(1, 8)
    assert probe_model(HeadFirst(), batch, lambda _: None) == ("head",)
    assert probe_model(ConvHead(), batch, lambda _: None) == ()
    assert probe_model(TiedHead(), batch, lambda _: None) == ("head",)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Pair(), "must give a tensor of scores, not a tuple"),
        (nn.Sequential(nn.LazyLinear(3)), "has lazy layers"),
        (nn.Sequential(nn.Embedding(5, 3)), "does not accept the inputs, of shape"),
        (nn.Sequential(nn.Linear(8, 2)), r"a score for each of 3 classes, but its output is \(1, 2\)"),
    ],
)
def test_models_that_do_not_fit_are_refused(model: nn.Module, sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        fedhm.run(model, *vectors())


@pytest.mark.usefixtures("without_figures")
def test_a_run_can_be_gone_on_with_where_there_are_more_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clients, test = vectors()
    settings = {"train": {"rounds": 1}, "method": {"tiers": [1, "1/4"], "keep": 0}}
    torch.manual_seed(0)
    model = HeadFirst()
    first = fedhm.run(model, clients, test, settings, tmp_path)
    monkeypatch.setattr("fedhm.config.schema.usable_cores", lambda: 64)
    assert fedhm.run(model, clients, test, fedhm.Config.model_validate(settings), tmp_path).metrics == first.metrics
    assert read_config(tmp_path).engine.threads == 1


def test_statistics_do_not_depend_on_dropout() -> None:
    """Dropout before BatchNorm: gathering must draw nothing, or two runs would differ."""
    clients, test = vectors()
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Dropout(0.5), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16), nn.Linear(16, 3)
    )
    settings = {"train": {"rounds": 2}, "method": {"tiers": [1, "1/4"]}, "engine": {"threads": 1}}
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        runs.append(fedhm.run(model, clients, test, settings).metrics)
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(seed)))
    assert runs[0] == runs[1]
