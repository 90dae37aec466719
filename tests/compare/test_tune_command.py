"""`fedhm compare --tune`, as a user meets it: real runs of a small model in processes of their own."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import forked
from fedhm.cli import main
from fedhm.runs.folder import read_config, read_data_facts

SMALL = [
    *("train.rounds=2", "train.epochs=1", "model.width=0.25", "federation.clients=4", "evaluation.every=1"),
    "train.clip_norm=0",  # so that a learning rate of 3000 diverges
]
COMMAND = [
    *("compare", "digits", "--methods", "fedavg,lowrank:1/8", "--seeds", "1", "--jobs", "2"),
    *("--tune", "train.lr=0.03,3000", "--tune-rounds", "1", "--set", *SMALL),
]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("forked_runs")]


@pytest.fixture(scope="module")
def finished(forked_runs: None, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001
    out = tmp_path_factory.mktemp("tuned") / "out"
    assert main([*COMMAND, "--out", str(out)]) == 0
    return out


def written(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in sorted(folder.glob("**/records.jsonl"))}


def test_each_entry_has_what_was_best_on_held_out_samples(finished: Path) -> None:
    tuned = json.loads((finished / "tune.json").read_text())
    assert (tuned["share"], tuned["rounds"], tuned["seed"], tuned["metric"]) == (0.2, 1, 0, "accuracy")
    assert list(tuned["entries"]) == ["fedavg", "lowrank:1/8"]
    for entry in tuned["entries"].values():
        good, bad = entry["tried"]
        assert entry["chosen"] == {"train.lr": 0.03}
        assert 0 < good["mean"] < 1
        assert (bad["mean"], bad["accuracy"]) == (None, {})  # it diverged, which is no reason to stop
        assert "cannot be used" in bad["failed"]
    text = (finished / "comparison.md").read_text()
    assert "| fedavg | train.lr=0.03 | " in text
    assert "| failed |" in text


def test_the_seeds_train_on_everything_and_tuning_runs_do_not(finished: Path) -> None:
    seen = {path: read_data_facts(finished / path) for path in ("fedavg-seed0", "tune/fedavg/train.lr=0.03")}
    whole, part = seen.values()
    assert whole is not None
    assert part is not None
    assert (whole.samples, part.samples) == (1442, 1442 - 288)
    config, tuning = (read_config(finished / path) for path in seen)
    assert (config.train.rounds, config.evaluated_on) == (2, "test")
    assert (tuning.train.rounds, tuning.evaluated_on) == (1, "validation")


def test_the_same_command_again_runs_nothing(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(finished)
    assert main([*COMMAND, "--out", str(finished)]) == 0
    assert written(finished) == before
    out = capsys.readouterr().out
    assert "runs to do" not in out
    assert "What was chosen" in out


def test_only_what_is_missing_is_run_and_the_choice_is_the_same(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "tune" / "fedavg" / "train.lr=0.03")
    shutil.rmtree(out / "lowrank-1-8-seed0")
    (out / "tune.json").unlink()
    assert main([*COMMAND, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"1 of 2 tuning runs to do in {out}, " in said
    assert f"1 of 2 runs to do in {out}, " in said
    for name in ("tune.json", "comparison.csv"):
        assert (out / name).read_text() == (finished / name).read_text()


def test_runs_that_were_tuned_are_compared_as_such(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again"
    assert main(["compare", "--out", str(again), "--runs", *sorted(map(str, finished.glob("*")))]) == 0
    expected = (finished / "comparison.csv").read_text().replace("lowrank:1/8", "lowrank-1-8")
    assert (again / "comparison.csv").read_text() == expected
    assert "learning rate tuned" in (again / "comparison.md").read_text()
    capsys.readouterr()


def test_runs_with_other_settings_are_refused_before_anything_runs(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = written(finished)
    others = [part.replace("0.03,3000", "0.1,3000") for part in COMMAND]
    assert main([*others, "--out", str(finished)]) == 1
    assert "fedavg-seed0 was run with train.lr = 0.03, now 0.1: choose another --out" in capsys.readouterr().err
    assert main([*COMMAND, "--tune-share", "0.1", "--out", str(finished)]) == 1
    assert "train.lr=0.03 was run with data.validation = 0.2, now 0.1: choose another" in capsys.readouterr().err
    assert written(finished) == before


def test_ctrl_c_in_tuning_is_resumed_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = [
        "--methods",
        "fedavg",
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--tune",
        "train.lr=0.03,0.1",
        "--tune-rounds",
        "300",
    ]
    command = ["compare", "digits", *options, "--out", str(out), "--set", *SMALL]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    records = out / "tune" / "fedavg" / "train.lr=0.03" / "records.jsonl"

    def begin_and_stop(rounds: int) -> int:
        process = forked.fedhm(command, forked.with_commands_for_runs, **streams)
        while process.poll() is None and not (records.exists() and records.read_bytes().count(b"\n") >= rounds):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err == "\nfedhm: stopped; the same command resumes what is missing\n"
        return records.read_bytes().count(b"\n")

    done = begin_and_stop(2)
    assert begin_and_stop(done + 1) > done
    assert not (out / "fedavg-seed0").exists()
