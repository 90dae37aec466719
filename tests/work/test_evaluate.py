"""Evaluation: by stored or by test-batch statistics; and a network that gives NaN is told from one that is wrong."""

import copy
import math
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.cli import main
from fedhm.config.objective import Metric
from fedhm.data.federation import Federation, hold_out_client_tests
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.errors import FedhmError, FedhmWarning
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


def by_hand(network: nn.Module, samples: Samples, preprocessing: Preprocessing, batch: int) -> tuple[float, float]:
    """Accuracy and loss of a copy in training mode, batch by batch: BatchNorm normalises by the batch."""
    twin = copy.deepcopy(network).train()
    pixels = samples.tensor.float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocessing.mean, preprocessing.std))
    with torch.no_grad():
        logits = torch.cat([twin((part - mean) / std) for part in pixels.split(batch)])
    right = (logits.argmax(1) == samples.labels).double().mean().item()
    return right, nn.functional.cross_entropy(logits.double(), samples.labels).item()


@pytest.mark.parametrize("batch", [5, 8, 40])
def test_batchnorm_normalises_by_the_test_batch_on_request(batch: int, federation: Federation) -> None:
    network, test = small_model(), federation.test
    assert test is not None
    for layer in network:
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.fill_(3.0)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    feed = Feed(test, federation.preprocessing)
    found = evaluate(network, feed, batch, Classification(), test_batch_statistics=True)
    assert (found.accuracy, found.loss) == pytest.approx(
        by_hand(network, test, federation.preprocessing, batch), rel=1e-5
    )
    assert found != evaluate(network, feed, batch, Classification())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not any(module.training for module in network.modules())


def test_a_run_evaluates_by_test_batches_at_the_server_and_at_clients(federation: Federation) -> None:
    left, tests = hold_out_client_tests(federation.clients, 0.4, 0)
    data = replace(federation, clients=left, client_tests=tests)
    config = small_config(evaluation={"statistics": "test-batch", "batch": 10})
    result = assemble(small_model(), data, config).run()
    assert all(record.statistics.clients == 0 for record in result.records)
    assert data.test is not None
    for tier, network in result.networks.items():
        found = result.metrics[tier]
        expected = by_hand(network, data.test, data.preprocessing, 10)
        assert (found.accuracy, found.loss) == pytest.approx(expected, rel=1e-4)
        for own in result.clients[tier].each:
            expected = by_hand(network, tests.samples[own.client], data.preprocessing, 10)
            assert (own.metrics.accuracy, own.metrics.loss) == pytest.approx(expected, rel=1e-4)
    # the running averages of training are kept, for whoever deploys the models
    assert not torch.equal(result.networks["full"][1].running_mean, torch.zeros(8))  # type: ignore[index]


def test_frozen_statistics_are_not_evaluated_by_test_batches() -> None:
    with pytest.raises(FedhmError, match=r"train\.frozen_statistics = true trains with stored statistics"):
        small_config(evaluation={"statistics": "test-batch"}, train={"frozen_statistics": True})


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

    monkeypatch.setattr("fedhm.cli.presets.show_presets", warn)
    assert main(["presets"]) == 0
    assert capsys.readouterr().err == "fedhm: all is lost\n"
    assert others == ["something else"]


def test_nan_is_neither_best_nor_worst() -> None:
    for values in ([math.nan, 1.0, 2.0], [1.0, math.nan, 2.0], [2.0, 1.0, math.nan]):
        assert (Metric("m").best(values), Metric("m").worst(values)) == (2, 1)
        assert (Metric("m", more_is_better=False).best(values), Metric("m", False).worst(values)) == (1, 2)
    assert math.isnan(Metric("m").best([math.nan]))
