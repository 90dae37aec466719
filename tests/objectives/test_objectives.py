"""Objectives: metrics against scikit-learn's, targets that are refused, and a run from a config."""

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import fedhm
from fedhm.cli import main
from fedhm.config.objective import Metrics, Objective
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.errors import FedhmError
from fedhm.objectives.classification import Classification
from fedhm.objectives.regression import Regression
from fedhm.work.evaluate import evaluate


def reference() -> Any:
    """scikit-learn's metrics, imported by who compares with them: that takes a second."""
    return import_module("sklearn.metrics")


@pytest.fixture(scope="module", autouse=True)
def _scikit_learn() -> None:
    """Imports it before a test's time is taken."""
    reference()


class Given(nn.Module):
    """A network that gives its inputs as outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def measured(objective: Objective, outputs: torch.Tensor, targets: torch.Tensor, batch: int) -> Metrics:
    return evaluate(Given(), Feed(Samples(outputs, targets), Preprocessing()), batch, objective)


@given(st.integers(0, 2**31), st.integers(2, 40), st.integers(1, 3), st.integers(1, 50), st.floats(-1e3, 1e3))
@example(seed=27436, count=2, columns=2, batch=1, shift=299.0)  # two targets that differ by little
def test_regression_is_that_of_scikit_learn(seed: int, count: int, columns: int, batch: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(count, columns, generator=generator, dtype=torch.float64) + shift
    f = y + torch.randn(count, columns, generator=generator, dtype=torch.float64)
    found = measured(Regression(), f, y, batch)
    assert found.r2 == pytest.approx(reference().r2_score(y, f), rel=1e-6, abs=1e-6)
    assert found.mse == pytest.approx(reference().mean_squared_error(y, f), rel=1e-9)
    if columns == 1:
        assert measured(Regression(), f, y[:, 0], batch) == pytest.approx(found)


@given(st.integers(0, 2**31), st.integers(2, 40), st.integers(1, 50))
def test_classification_is_that_of_scikit_learn(seed: int, count: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (count,), generator=generator)
    found = measured(Classification(), logits, labels, batch)
    assert found.accuracy == pytest.approx(reference().accuracy_score(labels, logits.argmax(1)))
    assert found.loss == pytest.approx(reference().log_loss(labels, logits.softmax(1), labels=range(4)))


def test_targets_without_variance_are_met_or_not() -> None:
    y = torch.full((5,), 3.0)
    assert measured(Regression(), y[:, None], y, 2).r2 == 1
    assert measured(Regression(), y[:, None] + 1, y, 2).r2 == 0
    for value in (1 / 3, 1e-9 / 3, 1e9 / 3, 1e-20):
        alike = torch.full((700,), value, dtype=torch.float64)
        assert measured(Regression(), alike[:, None] + 1, alike, 9).r2 == 0
    near_zero = 1e-20 * torch.arange(5, dtype=torch.float64)
    assert measured(Regression(), near_zero[:, None] + 2e-20, near_zero, 2).r2 == pytest.approx(-1)


def test_targets_too_large_to_be_squared_have_no_r2() -> None:
    y = torch.tensor([1e200, 2e200], dtype=torch.float64)
    assert math.isnan(measured(Regression(), y[:, None], y, 2).r2)


def test_order_and_batches_of_samples_do_not_change_r2() -> None:
    generator = torch.Generator().manual_seed(3)
    y = 1.7e9 + torch.randn(500, generator=generator, dtype=torch.float64)
    f = y.round()
    orders = torch.arange(500), torch.arange(499, -1, -1)
    found = [measured(Regression(), f[order, None], y[order], batch).r2 for order in orders for batch in (1, 64)]
    assert found == pytest.approx([found[0]] * 4, rel=1e-15)


def test_targets_far_from_zero_have_a_variance_too() -> None:
    generator = torch.Generator().manual_seed(0)
    y = 1.7e9 + 1000 * torch.randn(500, generator=generator, dtype=torch.float64)
    f = y + 10 * torch.randn(500, generator=generator, dtype=torch.float64)
    assert measured(Regression(), f[:, None], y, 64).r2 == pytest.approx(reference().r2_score(y, f), abs=1e-9)


def test_outputs_of_another_shape_and_memory_are_the_same_numbers() -> None:
    y = torch.randn(6, 16)
    images = y.reshape(6, 4, 2, 2).to(memory_format=torch.channels_last)
    assert measured(Regression(), images, y, 4).mse == 0
    assert Regression().loss(images, y, None) == 0


def test_metrics_are_called_by_their_names() -> None:
    metrics = Metrics(r2=0.5)
    assert metrics.r2 == metrics["r2"] == 0.5
    with pytest.raises(AttributeError, match="there is no metric 'accuracy', known are r2"):
        _ = metrics.accuracy


@pytest.mark.parametrize(
    ("labels", "objective", "sentence"),
    [
        (torch.rand(20), "classification", "to predict numbers, set objective = 'regression'"),
        (torch.full((20,), float("nan")), "regression", "hold NaN or infinite values"),
        (torch.rand(20, 2, 2), "regression", "the model must give 4 numbers for each sample, but its output is"),
        (torch.rand(20, 2), "regression", "the model must give 2 numbers for each sample, but its output is"),
        (
            torch.rand(20),
            "quantiles",
            "there is no objective 'quantiles', known are causal_lm, classification, multilabel, regression",
        ),
    ],
)
def test_what_cannot_be_learned_is_one_sentence(labels: torch.Tensor, objective: str, sentence: str) -> None:
    x = torch.randn(20, 5)
    with pytest.raises(FedhmError, match=sentence):
        fedhm.run(nn.Linear(5, 1), [(x, labels)], (x, labels), objective=objective)


def test_whole_numbers_can_be_predicted_too() -> None:
    x = torch.randn(40, 5)
    y = (3 * x[:, 0]).round().long()
    settings = {"train": {"rounds": 8, "lr": 0.1, "batch": 8}, "method": {"name": "fedavg"}}
    torch.manual_seed(0)
    result = fedhm.run(nn.Linear(5, 1), [(x[:20], y[:20]), (x[20:], y[20:])], (x, y), settings, objective="regression")
    assert result.metrics["full"].r2 > 0.8


@pytest.mark.slow
def test_a_preset_of_regression_runs_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["run", "diabetes", "--out", str(out), "--set", "train.rounds=4"]) == 0
    said = capsys.readouterr().out
    assert "r2" in said
    assert "mse" in said
    assert "accuracy" not in said
    record = json.loads((out / "records.jsonl").read_text().splitlines()[-1])
    assert set(record["metrics"]["full"]) == {"r2", "mse"}
    assert (out / "r2-by-round.png").exists()
    assert fedhm.resume(out).metrics["full"].r2 == record["metrics"]["full"]["r2"]
    with pytest.raises(FedhmError, match="partitions by label, and diabetes has no labels"):
        fedhm.prepare(fedhm.load_config("diabetes", ["data.partition=dirichlet"]))


def test_images_are_predicted() -> None:
    generator = torch.Generator().manual_seed(0)
    clean = torch.rand(48, 1, 6, 6, generator=generator)
    noisy = clean + 0.3 * torch.randn(48, 1, 6, 6, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    model.append(nn.Conv2d(8, 1, 3, padding=1))
    settings = {"train": {"rounds": 6, "lr": 0.1, "batch": 8}, "method": {"tiers": [1, "1/4"]}}
    clients = [(noisy[start:40:2], clean[start:40:2]) for start in range(2)]
    found = fedhm.run(model, clients, (noisy[40:], clean[40:]), settings, objective="regression")
    errors = found.networks["1/4"](noisy[40:]) - clean[40:]
    assert found.metrics["1/4"].mse == pytest.approx(errors.square().mean().item(), rel=1e-4)
    assert found.metrics["1/4"].mse < clean[40:].square().mean()  # better than no picture at all
    with pytest.raises(FedhmError, match="crop and flip move images and not their targets"):
        fedhm.run(model, clients, None, settings, objective="regression", flip=True)


def test_each_image_has_the_mean_of_its_errors() -> None:
    output, targets = torch.randn(5, 3, 2, 2), torch.randn(5, 3, 2, 2)
    losses = Regression().sample_losses(output, targets, torch.ones(12))
    assert losses is not None
    torch.testing.assert_close(losses, (output - targets).square().mean((1, 2, 3)))
