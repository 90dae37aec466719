"""Whatever is handed in, what is wrong with it is one sentence: no traceback, no crash, and nothing is left behind."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedhm
from conftest import no_figures
from fedhm.cli import main
from fedhm.config.loading import load_config
from fedhm.errors import FedhmError

HUGE = 10**30
NO_TEXT = os.fsdecode(b"bad\xff")  # a name that is not UTF-8


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ('method.tiers=["1e400"]', "method.tiers.0: input should be a finite number (got '1e400')"),
        ('method.tiers=["1e999999999"]', "method.tiers.0: input should be a finite number"),
        ('method.tiers=["1/0"]', "method.tiers.0: input should be a valid number"),
        (f'method.tiers=["{"9" * 400}/1"]', "method.tiers.0: input should be a valid number"),
        ("method.name=[1]", "there is no method '[1]', known are fedhm"),
        ("objective.name=[1]", "there is no objective '[1]'"),
        ("method=[]", "method: input should be a valid dictionary"),
        ("engine.threads=100000", "engine.threads: input should be less than or equal to 1024 (got 100000)"),
        ("engine.server_threads=100000", "engine.server_threads: input should be less than or equal to 1024"),
        ("engine.workers=100000", "engine.workers: input should be less than or equal to 1024"),
        (f"evaluation.batch={HUGE}", "evaluation.batch: input should be less than or equal to 1000000000"),
        (f"train.batch={HUGE}", "train.batch: input should be less than or equal to 1000000000"),
        (f"federation.attempts={HUGE}", "federation.attempts: input should be less than or equal to 1000000000"),
        (f"federation.clients={HUGE}", "federation.clients: input should be less than or equal to 1000000000"),
        ("checkpoints.keep=0", "checkpoints.keep: input should be greater than or equal to 1"),
        ("checkpoints.keep=some", "checkpoints.keep"),
        ("seed=" + "9" * 5000, "has too many digits"),
        ("seed=0x" + "f" * 5000, "seed: input should be less than 9223372036854775808"),
        ("train.milestones=" + "[" * 5000 + "]" * 5000, "is nested too deeply"),
        (f"train.lr={'x' * 5000}", "train.lr: input should be a valid number"),
    ],
)
def test_settings(change: str, sentence: str) -> None:
    with pytest.raises(FedhmError) as error:
        load_config("digits", [change])
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--set", "model.width=1e300"], "makes a model of inf GB, too large to be trained in the memory here"),
        (["--set", "model.width=1e5"], "model.width = 100000 makes a model of"),
        (["--set", "model.width=1000"], "model.width = 1000 makes a model of"),
        (["--set", f"data.crop={HUGE}"], "but images of 8 pixels can be padded by 0…8"),
        (["--set", "data.crop=9"], "crop = 9, but images of 8 pixels can be padded by 0…8"),
        (["--set", "engine.device=hpu"], "engine.device = 'hpu' cannot be used with this PyTorch"),
        (["--set", f"data.folder={NO_TEXT}"], r'there is a name that is not in UTF-8: folder = "'),
        (["--out", NO_TEXT], r"the name bad\xff is not in UTF-8: rename it, or choose another"),
    ],
)
def test_runs(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    _one_sentence(capsys, sentence, "run", "digits", *arguments)
    assert not list(tmp_path.rglob("*.toml"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["resume", NO_TEXT], r"the name bad\xff is not in UTF-8"),
        (["report", NO_TEXT], r"bad\xff is not in UTF-8"),
        (["resume", "here", "--from", "0"], "--from takes a whole number from 1 on, not '0'"),
        (["resume", "here", "--from", "9" * 5000], "--from takes a whole number from 1 on, not '999"),
        (["resume", "here", "--workers", "100000"], "--workers takes a whole number from 1 to 1024, or auto"),
    ],
)
def test_options(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    _one_sentence(capsys, sentence, *arguments)


def _one_sentence(capsys: pytest.CaptureFixture[str], sentence: str, *arguments: str) -> None:
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert len(said) < 400


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"x = " + b"[" * 5000 + b"]" * 5000, "is not valid TOML: its values are nested too deeply"),
        (b"seed = " + b"9" * 5000, "is not valid TOML: a number in it has too many digits"),
        ("[train]\n".encode("utf-16"), "is not a text file in UTF-8"),
        (b"[train]\nrounds = \xff", "is not a text file in UTF-8"),
        (b"[" + b".".join([b"a"] * 5000) + b"]", "unknown key 'a'"),
    ],
)
def test_config_files(content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises(FedhmError, match=sentence):
        load_config(str(tmp_path / "config.toml"))


def test_a_config_may_begin_with_the_mark_of_an_editor(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"\xef\xbb\xbf[train]\nrounds = 7\n")
    assert load_config(str(tmp_path / "config.toml")).train.rounds == 7


X, Y = torch.randn(12, 4), torch.arange(12) % 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"config": {"federation": [1, 2]}}, r"config: federation: input should be a mapping \(got \[1, 2\]\)"),
        ({"config": {"train": [1]}}, "config: train: input should be a valid dictionary"),
        ({"config": [1]}, "config must be a mapping of sections"),
        ({"model": nn.Linear}, "model must be an nn.Module, ready to be trained, not the class Linear"),
        ({"model": "resnet"}, "model must be an nn.Module, ready to be trained, not a str"),
        ({"clients": [(X.to_sparse(), Y)]}, "the inputs and labels of client 0 must be plain dense tensors"),
        ({"clients": [(X, Y.to_sparse())]}, "the inputs and labels of client 0 must be plain dense tensors"),
        ({"clients": [fedhm.Samples(X.to_sparse(), Y)]}, "the inputs and labels of client 0 must be plain dense"),
        ({"public": X.to_sparse()}, "the inputs and labels of the public set must be plain dense tensors"),
        ({"test": (X.to("meta"), Y)}, "the inputs and labels of the test set must be plain dense tensors"),
        ({"test": (X, Y + 1j)}, "the labels of the test set must be whole class numbers"),
        ({"objective": "regression", "clients": [(X, X[:, 0] + 1j)]}, "the targets of client 0 are complex"),
        ({"crop": -1}, "crop = -1, but images"),
    ],
)
def test_what_is_handed_over_in_python(arguments: dict[str, Any], sentence: str) -> None:
    given: dict[str, Any] = {"model": nn.Linear(4, 3), "clients": [(X, Y)], "test": (X, Y), "config": {}}
    with pytest.raises(FedhmError, match=sentence):
        fedhm.run(**{**given, **arguments})


@pytest.mark.parametrize("ratio", ["1e999999999", "1/0", "9" * 400 + "/1", "half"])
def test_ratios_of_rank_plans(ratio: str) -> None:
    with pytest.raises(FedhmError, match=r"is not a rank ratio|a rank ratio lies above 0"):
        fedhm.plan_ranks(nn.Linear(4, 3), ratio)


@pytest.mark.slow
def test_names_with_brackets_and_dollars_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"train": {"rounds": 1}, "engine": {"threads": 1}, "method": "fedavg"}
    places = [Path("x/[/a]"), Path("[red]b"), Path(r"$\frac$")]
    with no_figures():
        for place in places[:2]:
            fedhm.run(nn.Linear(4, 3), [(X, Y)], (X, Y), settings, out=place)
    fedhm.run(nn.Linear(4, 3), [(X, Y)], (X, Y), settings, out=places[2])  # its dollars are no formula in a figure
    assert main(["report", *map(str, places), "--out", "both[/b]"]) == 0
    out = capsys.readouterr().out
    assert "both[/b]/report.md" in out
    assert "a]: fedavg" in out
    assert "[red]b: fedavg" in out
    assert r"$\frac$: fedavg" in out
