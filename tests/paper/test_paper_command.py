"""`fedhm paper`, as a user meets it: real runs of a small table on images of a few classes."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhm.cli import main
from fedhm.data.images import CIFAR10
from fedhm.paper.estimate import schedule

pytestmark = pytest.mark.usefixtures("forked_runs")

TINY = ["train.rounds=1", "model.width=0.0625", "federation.clients=4", "evaluation.every=1", "train.batch=10"]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CIFAR-10 of 100 training and 20 test images."""
    folder = tmp_path_factory.mktemp("data")
    (folder / CIFAR10.folder).mkdir()
    chance = random.Random(0)
    for name in CIFAR10.files:
        rows = [bytes([number % 10]) + chance.randbytes(3072) for number in range(20)]
        (folder / CIFAR10.folder / name).write_bytes(b"".join(rows))
    return folder


def command(name: str, data: Path, out: Path, *more: str) -> list[str]:
    options = ["--scale", "small", "--out", str(out), "--jobs", "2", *more]
    return ["paper", name, *options, "--set", *TINY, f"data.folder={data}"]


def written(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in folder.glob("*/*/records.jsonl")}


@pytest.mark.slow
def test_a_table_runs_once_and_its_figures_share_the_runs(
    cifar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command("table8", cifar, tmp_path)) == 0
    said = capsys.readouterr().out
    assert "7 of 7 runs to do" in said
    assert "94.16" in said
    assert "only the order of the" in " ".join(said.split())
    stem = "table8-cifar10-iid-small"
    assert {path.name for path in tmp_path.glob("*.*")} == {f"{stem}.{kind}" for kind in ("md", "csv", "png", "html")}
    before, table = written(tmp_path), (tmp_path / f"{stem}.csv").read_text()
    assert len(before) == 7

    for name in ("table8", "homogeneous", "figure3", "figure4"):
        assert main(command(name, cifar, tmp_path)) == 0
    assert "runs to do" not in capsys.readouterr().out
    assert written(tmp_path) == before
    assert (tmp_path / f"{stem}.csv").read_text() == table

    assert main(command("figure8", cifar, tmp_path)) == 0
    assert "1 of 8 runs to do" in capsys.readouterr().out
    assert "lowrank-rank-k" in (tmp_path / "figure8-cifar10-iid-small.csv").read_text()

    assert main([*command("table8", cifar, tmp_path), "train.lr=0.05"]) == 1  # another --set of the same command
    assert "was run with train.lr" in capsys.readouterr().err


@pytest.mark.slow
def test_an_estimate_measures_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(command("table3", tmp_path, out, "--estimate", "--methods", "splitmix,fedavg,fedhm-default")) == 0
    said = capsys.readouterr().out
    for entry in ("splitmix", "slimmed:", "fedhm-default"):
        assert f"│ {entry}" in said
    assert not out.exists()


@pytest.mark.slow
def test_missing_data_is_the_loaders_own_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("table8", tmp_path, tmp_path / "out", "--methods", "slimmed")) == 1
    assert "cifar-10" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["table9"], "the paper has no 'table9': did you mean table"),
        (["table7", "--data", "cifar100"], "table7 has no --data cifar100"),
        (["table2", "--data", "mnist"], "--data takes cifar10 or cifar100 or tinyimagenet, not 'mnist'"),
        (["table2", "--methods", "fedhm"], "table2 has no column 'fedhm', did you mean 'fedhm-"),
        (["table2", "--target", "0.5"], "--target is for figure4"),
        (["figure4", "--target", "50"], "--target takes an accuracy between 0 and 1"),
    ],
)
def test_bad_options_are_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", *arguments, "--out", str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("fedhm: ")
    assert sentence in err
    assert not (tmp_path / "out").exists()


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=12), st.integers(1, 5))
def test_runs_side_by_side_take_no_longer_than_one_after_the_other(seconds: list[float], jobs: int) -> None:
    whole = schedule(seconds, jobs)
    assert max(seconds) <= whole <= sum(seconds) + 1e-6
    assert whole >= sum(seconds) / jobs - 1e-6
    assert schedule(seconds, 1) == pytest.approx(sum(seconds))
