"""Checkpoints are kept as long as a run says, the run goes back to any of them, and nothing is lost on the way."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedhm
from fedhm.cli import main
from fedhm.errors import FedhmError
from fedhm.report.result import Result
from fedhm.runs.folder import RunFolder
from fedhm.runs.rounds import read_records
from run_outcome import edit_sealed, outcome

DIGITS = ["train.rounds=3", "data.train_samples=40", "model.width=0.05", "method.name=fedavg", "engine.workers=1"]
DIGITS += ["federation.clients=2", "train.epochs=1", "evaluation.every=3", "checkpoints.keep=all"]
pytestmark = pytest.mark.usefixtures("without_figures")
X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


def run(out: Path, from_round: int | None = None, seed: int = 0, **sections: dict[str, Any]) -> Result:
    torch.manual_seed(seed)
    settings = {"train": {"rounds": 5, "batch": 8}, "engine": {"threads": 1}, "method": "fedavg", **sections}
    clients = [(X[::2], Y[::2]), (X[1::2], Y[1::2])]
    return fedhm.run(nn.Linear(4, 3), clients, (X, Y), settings, out, from_round=from_round)


def kept(out: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("round-")) for path in (out / "checkpoints").iterdir())


def leave_records(out: Path, count: int) -> None:
    file = out / "records.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:count]))


def take_back(out: Path, last: int) -> None:
    with RunFolder.open(out) as folder:
        folder.rewind(last)


@pytest.mark.parametrize(("keep", "rounds"), [(1, [5]), (2, [4, 5]), (3, [3, 4, 5]), ("all", [1, 2, 3, 4, 5])])
def test_as_many_checkpoints_are_kept_as_the_run_says(keep: object, rounds: list[int], tmp_path: Path) -> None:
    run(tmp_path, checkpoints={"keep": keep})
    assert kept(tmp_path) == rounds
    run(tmp_path)  # how many are kept does not make another run of it
    assert kept(tmp_path) == rounds


def test_a_run_goes_back_to_a_round_and_ends_as_it_did(tmp_path: Path) -> None:
    run(tmp_path, checkpoints={"keep": "all"})
    before, records = outcome(tmp_path), (tmp_path / "records.jsonl").read_text().splitlines()
    for number, last in ((1, 2), (2, 4)):
        take_back(tmp_path, last)
        aside = tmp_path / f"taken-back-{number}"
        assert len(read_records(tmp_path / "records.jsonl")) == last
        assert kept(tmp_path) == list(range(1, last + 1))
        assert kept(aside) == list(range(last + 1, 6))
        assert (aside / "models" / "full.safetensors").exists()
        if number == 1:
            assert (aside / "records.jsonl").read_text().splitlines() == records[last:]
        run(tmp_path, checkpoints={"keep": "all"})
        assert outcome(tmp_path) == before


def test_a_round_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(FedhmError, match=r"has no checkpoint of round 2, only of 4 and 5; .* with checkpoints.keep"):
        take_back(tmp_path, 2)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(FedhmError, match="has no checkpoint of round 2, nor of any other"):
        take_back(tmp_path, 2)
    assert not list(tmp_path.glob("taken-back-*"))


def test_records_without_any_checkpoint_are_not_thrown_away(tmp_path: Path) -> None:
    run(tmp_path)
    before = (tmp_path / "records.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(FedhmError, match=r"names 5 rounds, but there is no checkpoint in .*: put one back to resume"):
        run(tmp_path)
    assert (tmp_path / "records.jsonl").read_bytes() == before
    assert (tmp_path / "models" / "full.safetensors").exists()


def test_the_record_of_a_first_round_that_was_killed_is_taken_back(tmp_path: Path) -> None:
    run(tmp_path)
    expected = outcome(tmp_path)
    for folder in ("checkpoints", "models"):
        shutil.rmtree(tmp_path / folder)
    (tmp_path / "report.md").unlink()
    leave_records(tmp_path, 1)
    (tmp_path / "models" / "best-round-1").mkdir(parents=True)  # which is there before the record is
    run(tmp_path)
    (tmp_path / "models" / "best-round-1").rmdir()
    assert outcome(tmp_path) == expected


@pytest.mark.parametrize("left", [0, 1])
def test_results_without_any_checkpoint_are_not_written_over(left: int, tmp_path: Path) -> None:
    run(tmp_path, train={"rounds": 2, "batch": 8})
    shutil.rmtree(tmp_path / "checkpoints")
    leave_records(tmp_path, left)
    for what in ("models", "report"):
        with pytest.raises(FedhmError, match=rf"holds the {what} of a run, but there is no checkpoint in .*: put one"):
            run(tmp_path, train={"rounds": 2, "batch": 8})
        assert len(read_records(tmp_path / "records.jsonl")) == left
        shutil.rmtree(tmp_path / "models", ignore_errors=True)


def test_the_models_of_a_best_round_stay_if_it_does(tmp_path: Path) -> None:
    settings = {"train": {"rounds": 4, "batch": 8, "lr": 1e-9}, "stop": {"patience": 9}, "checkpoints": {"keep": "all"}}
    best = run(tmp_path, **settings).best_round
    assert best == 1
    folder = tmp_path / "models" / f"best-round-{best}"
    before = (folder / "full.safetensors").read_bytes()
    take_back(tmp_path, 3)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [folder.name]
    assert [path.name for path in (tmp_path / "taken-back-1" / "models").iterdir()] == ["full.safetensors"]
    again = run(tmp_path, **settings)
    assert (again.best_round, again.best.keys()) == (best, {"full"})
    assert (folder / "full.safetensors").read_bytes() == before
    (folder / "full.safetensors").write_bytes(b"x")
    with pytest.raises(FedhmError, match=r"cannot read .*; put it back, or remove .*best-round-1 to do without"):
        run(tmp_path, **settings)
    shutil.rmtree(folder)
    assert run(tmp_path, **settings).best == {}


def test_where_nothing_is_taken_back_nothing_is_moved(tmp_path: Path) -> None:
    run(tmp_path, train={"rounds": 2, "batch": 8})
    before = outcome(tmp_path)
    take_back(tmp_path, 2)
    assert not list(tmp_path.glob("taken-back-*"))
    assert outcome(tmp_path) == before


def test_records_of_checkpoints_that_somebody_removed_are_moved_aside(tmp_path: Path) -> None:
    run(tmp_path, checkpoints={"keep": "all"})
    expected, records = outcome(tmp_path), read_records(tmp_path / "records.jsonl")
    for number in (4, 5):
        (tmp_path / "checkpoints" / f"round-00000{number}.safetensors").unlink()
    run(tmp_path)
    assert outcome(tmp_path)["records"] == expected["records"]
    assert read_records(tmp_path / "taken-back-1" / "records.jsonl") == records[3:]


def test_a_run_of_ones_own_model_goes_back(tmp_path: Path) -> None:
    settings = {"train": {"rounds": 3, "batch": 8}, "checkpoints": {"keep": "all"}}
    out = tmp_path / "run"
    with pytest.raises(FedhmError, match="from_round goes back in a run that has begun: out must be its folder"):
        run(out, from_round=1, **settings)
    run(out, **settings)
    before = outcome(out)
    with pytest.raises(FedhmError, match=r"started from Python .* with from_round=ROUND from an earlier round"):
        fedhm.resume(out, from_round=1)
    with pytest.raises(FedhmError, match="belongs to another run"):
        run(out, from_round=1, seed=1, **settings)
    first = out / "checkpoints" / "round-000001.safetensors"
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    with pytest.raises(FedhmError, match="is damaged"):
        run(out, from_round=1, **settings)
    first.write_bytes(content)
    assert not list(out.glob("taken-back-*"))
    assert outcome(out) == before
    run(out, from_round=1, **settings)
    assert outcome(out) == before
    assert kept(out / "taken-back-1") == [2, 3]


def test_from_the_shell_and_from_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["run", "digits", "--set", *DIGITS, "--out", str(out)]) == 0
    before = outcome(out)
    assert main(["resume", str(out), "--from", "1"]) == 0
    assert outcome(out) == before
    assert "1 of 3 rounds are done" in capsys.readouterr().out
    fedhm.resume(out, from_round=2)
    assert outcome(out) == before
    assert {path.name for path in out.glob("taken-back-*")} == {"taken-back-1", "taken-back-2"}
    assert main(["resume", str(out), "--from", "7"]) == 1
    assert "has no checkpoint of round 7, only of 1 and 2 and 3" in capsys.readouterr().err


def test_on_flower_nothing_is_moved_for_a_run_that_cannot_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["run", "digits", "--set", *DIGITS, "--out", str(out)]) == 0
    edit_sealed(out / "config.toml", ('name = "local"', 'name = "flower"'), ("train_samples = 40", "train_samples = 1"))
    before = outcome(out)
    assert main(["resume", str(out), "--from", "1"]) == 1
    assert "samples" in capsys.readouterr().err
    assert not list(out.glob("taken-back-*"))
    assert outcome(out) == before


def test_a_run_of_a_flower_app_goes_back_for_its_app(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, train={"rounds": 3, "batch": 8})
    edit_sealed(tmp_path / "config.toml", ('name = "local"', 'name = "flower"'))
    assert main(["resume", str(tmp_path), "--from", "2"]) == 0
    assert "the same 'flwr run' resumes" in capsys.readouterr().out
    assert kept(tmp_path / "taken-back-1") == [3]
