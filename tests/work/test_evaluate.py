"""A network that gives NaN is told from one that is wrong."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedhm
from fedhm.cli import main
from fedhm.config.objective import Metric
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.errors import FedhmWarning
from fedhm.objectives.classification import Classification
from fedhm.objectives.regression import Regression
from fedhm.report.plot import save_png
from fedhm.report.plots import client_plot
from fedhm.report.sections import run_sections
from fedhm.report.tables import report_markdown
from fedhm.runs.history import read_runs
from fedhm.work.evaluate import evaluate


class Broken(nn.Module):
    """Give NaN in evaluation for inputs below a bound."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.layer, self.bound = nn.Linear(2, 2), bound

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if self.training else out.where(x[:, :1] >= self.bound, torch.nan)


X, Y = torch.arange(8.0)[:, None].expand(8, 2).contiguous(), torch.zeros(8, dtype=torch.int64)


@pytest.mark.parametrize("bad", [0, 3, 8])
def test_what_is_nan_is_not_right(bad: int) -> None:
    network = Broken(bad)
    network.layer.bias.data, network.layer.weight.data = torch.tensor([1.0, 0.0]), torch.zeros(2, 2)
    metrics = evaluate(network, Feed(Samples(X, Y), Preprocessing()), 3, Classification())
    assert metrics.accuracy == (8 - bad) / 8  # the answer is 0 for all, which is also where the first NaN is
    assert math.isnan(metrics.loss) == (bad > 0)


def test_numbers_that_are_nan_have_nan_metrics() -> None:
    network = nn.Sequential(Broken(3), nn.Linear(2, 1))
    metrics = evaluate(network, Feed(Samples(X, X[:, :1]), Preprocessing()), 3, Regression())
    assert math.isnan(metrics.r2)
    assert math.isnan(metrics.mse)


def test_a_run_warns_of_it_and_goes_on() -> None:
    settings = {"train": {"rounds": 2, "lr": 0.01}, "engine": {"threads": 1}, "method": "fedavg"}
    with pytest.warns(
        FedhmWarning, match=r"after round \d the model of tier full gives NaN or infinite values for test"
    ):
        result = fedhm.run(Broken(3), [(X, Y)], (X, Y), settings)
    assert len(result.records) == 2
    assert math.isnan(result.metrics["full"].loss)


@pytest.mark.usefixtures("without_figures")
def test_a_run_that_only_clients_evaluate_goes_on_too(tmp_path: Path) -> None:
    settings = {"train": {"rounds": 2, "lr": 0.01}, "engine": {"threads": 1}, "method": "fedavg"}
    clients = [(X + 8 * shift, Y) for shift in range(3)]  # of the first one's samples, the model is right for five
    with pytest.warns(
        FedhmWarning, match=r"the model of tier full gives NaN or infinite values for test samples of cl"
    ):
        result = fedhm.run(
            Broken(3), clients, None, {**settings, "stop": {"patience": 5}}, tmp_path / "run", client_test=clients
        )
    last = result.clients["full"].overall
    assert len(result.records) == 2
    assert all(math.isfinite(each.loss) for each in (last.pooled, last.mean, last.median, last.worst_tenth))
    assert math.isnan(result.clients["full"].each[0].metrics.loss)
    runs = read_runs([tmp_path / "run"])
    assert runs[0].evaluated_at_clients
    assert "on the clients' own test samples" in report_markdown(runs)
    assert run_sections(runs)
    plot = client_plot(runs[0], runs)
    assert plot is not None
    assert save_png([plot], tmp_path / "clients.png").exists()
    with pytest.warns(FedhmWarning, match="gives NaN"):
        nowhere = fedhm.run(Broken(99), clients, None, settings, client_test=clients)
    last = nowhere.clients["full"].overall
    assert all(math.isnan(each.loss) for each in (last.pooled, last.mean, last.median, last.worst_tenth))


def test_the_command_line_shows_warnings_as_sentences(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: others.append(str(message)))  # Python's own

    def warn(*_: object) -> None:
        warnings.simplefilter("always")
        warnings.warn("all is lost", FedhmWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)

    monkeypatch.setattr("fedhm.cli.report.list_presets", warn)
    assert main(["presets"]) == 0
    assert capsys.readouterr().err == "fedhm: all is lost\n"
    assert others == ["something else"]


def test_nan_is_neither_best_nor_worst() -> None:
    for values in ([math.nan, 1.0, 2.0], [1.0, math.nan, 2.0], [2.0, 1.0, math.nan]):
        assert (Metric("m").best(values), Metric("m").worst(values)) == (2, 1)
        assert (Metric("m", more_is_better=False).best(values), Metric("m", False).worst(values)) == (1, 2)
    assert math.isnan(Metric("m").best([math.nan]))
