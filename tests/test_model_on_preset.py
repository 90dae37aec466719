"""A user's own model on the data of a preset: in Python, and on the command line."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fedhm
from conftest import no_figures
from fedhm.cli import main

CHANGES = ["train.rounds=1", "federation.clients=4", "data.train_samples=100", "engine.threads=1", "engine.workers=1"]
OWN = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

def wrong():
    return 3
"""


def make() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def test_prepare_takes_a_model_or_a_function() -> None:
    config = fedhm.load_config("digits", [*CHANGES, "method.tiers=[1, 1/4]"])
    experiment = fedhm.prepare(config, model=make)
    again = fedhm.prepare(config, model=make)
    assert all(torch.equal(experiment.initial[name], again.initial[name]) for name in again.initial)
    assert experiment.config.model is None
    assert experiment.run().networks["full"][1].in_features == 64
    model = make()
    assert torch.equal(fedhm.prepare(config, model=model).initial["1.weight"], model[1].weight)
    with pytest.raises(fedhm.FedhmError, match=r"takes settings that are read, .* fedhm\.load_config\('digits'\)"):
        fedhm.prepare("digits", model=model)  # type: ignore[arg-type]
    with pytest.raises(fedhm.FedhmError, match="the model cannot be made: ZeroDivisionError"):
        fedhm.prepare(config, model=lambda: 1 / 0)  # type: ignore[arg-type,return-value]


@no_figures()
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own, run = f"{tmp_path / 'own.py'}:make", str(tmp_path / "run")
    options = [part for change in (*CHANGES, "method.tiers=[1, 1/4]") for part in ("--set", change)]
    assert main(["run", "digits", *options, "--model", own, "--out", run]) == 0
    assert main(["resume", run, "--rounds", "2", "--model", own]) == 0
    assert main(["export", run, "--tier", "1/4", "--to", "torch", "--model", own]) == 0
    assert (tmp_path / "run" / "export" / "1-4.pt2").is_file()
    capsys.readouterr()
    assert main(["export", run, "--to", "torch"]) == 1
    assert "was run with a model of your own: name it with --model FILE.py:FUNCTION" in capsys.readouterr().err
    capsys.readouterr()
    assert main(["resume", run, "--rounds", "3"]) == 1
    assert "--model FILE.py:FUNCTION" in capsys.readouterr().err
    for text, sentence in (
        ("own.py", "--model takes FILE.py:FUNCTION"),
        (f"{tmp_path / 'other.py'}:make", "there is no file"),
        (f"{tmp_path / 'own.py'}:make2", "has no function 'make2'"),
        (f"{tmp_path / 'own.py'}:wrong", "returns a int, not an nn.Module"),
        ("no_such_module:make", "no_such_module cannot be imported"),
    ):
        assert main(["run", "digits", *options, "--model", text, "--out", str(tmp_path / "other")]) == 1
        assert sentence in capsys.readouterr().err


@no_figures()
def test_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    options = [part for change in (*CHANGES, "method.tiers=[1, 1/4]") for part in ("--set", change)]
    compare = ["compare", "digits", *options, "--methods", "fedhm,heterofl", "--seeds", "1", "--jobs", "1"]
    assert main([*compare, "--model", f"{tmp_path / 'own.py'}:make", "--out", str(tmp_path / "both")]) == 0
    said = capsys.readouterr()
    assert "fedhm" in said.out
    assert main(["report", str(tmp_path / "both")]) == 0
