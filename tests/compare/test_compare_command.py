"""`fedhm compare`, as a user meets it: real runs of a small model in processes of their own."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import forked
from conftest import no_figures
from fedhm.cli import main
from fedhm.runs.folder import read_config

SMALL = ["train.rounds=3", "train.epochs=1", "model.width=0.25", "federation.clients=8", "evaluation.every=1"]
SMALL += ["data.train_samples=400"]
THREE = ["compare", "digits", "--methods", "fedhm,fedavg,lowrank:1/8", "--seeds", "2", "--set", *SMALL]


pytestmark = pytest.mark.usefixtures("forked_runs")  # but for comparisons that are processes themselves


@pytest.fixture(scope="module")
def finished(forked_runs: None, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001
    out = tmp_path_factory.mktemp("comparison") / "out"
    assert main([*THREE, "--out", str(out)]) == 0
    return out


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("fedhm: ")
    assert "Traceback" not in err
    return err


def started(folder: Path) -> list[float]:
    return [(run / "records.jsonl").stat().st_mtime for run in sorted(folder.glob("*-seed*"))]


def processes_in(folder: Path) -> list[int]:
    """Those that have the folder in their command line, but for the comparison itself."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # ended just now
        if b"resume" in words and any(str(folder).encode() in word for word in words):
            found.append(int(path.name))
    return found


def begin(out: Path, *methods: str, rounds: int) -> "subprocess.Popen[str]":
    """A comparison whose runs are commands of their own: all but itself is as a user has it."""
    settings = [*SMALL, f"train.rounds={rounds}"]
    command = ["compare", "digits", "--methods", ",".join(methods), "--seeds", "1", "--jobs", "2"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return forked.fedhm([*command, "--set", *settings, "--out", str(out)], forked.with_commands_for_runs, **streams)


def wait_for_rounds(folder: Path, rounds: int, process: "subprocess.Popen[str]") -> None:
    while process.poll() is None:
        records = folder / "records.jsonl"
        if records.exists() and records.read_bytes().count(b"\n") >= rounds:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate())


@pytest.mark.slow
def test_every_run_is_complete_and_the_tables_are_written(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == {
        *(f"{entry}-seed{seed}" for entry in ("fedhm", "fedavg", "lowrank-1-8") for seed in (0, 1)),
        "report.html", "comparison.md", "comparison.csv", "convergence-smallest.png", "accuracy-by-communication.png",
        "accuracy-by-computation.png", "cost-to-target.png", "parameters-and-macs-by-layer.png",
        "energy-beyond-rank.png", "comparison.json",
    }  # fmt: skip
    config = read_config(finished / "lowrank-1-8-seed1")
    assert (config.seed, config.compare, config.engine.threads) == (1, None, 1)
    lines = (finished / "comparison.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 3 * (4 + 1 + 1)
    assert "seeds 0, 1" in (finished / "comparison.md").read_text()


@pytest.mark.slow
def test_the_same_command_again_runs_nothing(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = started(finished)
    assert main([*THREE, "--out", str(finished)]) == 0
    assert started(finished) == before
    out = capsys.readouterr().out
    assert "runs to do" not in out
    assert "│ full │" in out
    assert "What each tier spent" in out


@pytest.mark.slow
def test_a_missing_and_an_interrupted_run_are_made_up_for(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    expected = (finished / "comparison.csv").read_text()
    shutil.rmtree(out / "fedavg-seed1")
    interrupted = out / "fedhm-seed0"
    shutil.rmtree(interrupted / "models")
    max((interrupted / "checkpoints").iterdir()).unlink()  # as if it was killed in its last round
    assert main([*THREE, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"2 of 6 runs to do in {out}, " in said
    assert "fedavg-seed1 runs\n" in said
    assert "fedhm-seed0 runs after round" in said
    assert (out / "comparison.csv").read_text() == expected


@pytest.mark.slow
def test_a_folder_of_other_settings_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = started(finished)
    message = failure(capsys, *THREE, "train.rounds=2", "--out", str(finished))
    assert f"{finished}/fedhm-seed0 was run with train.rounds = 3, now 2: choose another --out" in message
    assert started(finished) == before


@pytest.mark.slow
def test_runs_that_exist_give_the_same_table(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = sorted(map(str, finished.glob("*")))  # as a shell's star would, tables and figures included
    assert main(["compare", "--out", str(tmp_path / "again"), "--runs", *folders]) == 0
    again = (tmp_path / "again" / "comparison.md").read_text()
    full, _ = [
        line for line in (finished / "comparison.md").read_text().splitlines() if line.startswith("| full |")
    ]  # the other: differences
    columns = {cell.strip() for cell in full.split("|")}
    assert any({cell.strip() for cell in line.split("|")} == columns for line in again.splitlines())
    assert (tmp_path / "again" / "cost-to-target.png").exists()
    capsys.readouterr()
    sentence = failure(capsys, "compare", "--runs", str(finished / "fedhm-seed0"), *map(str, finished.glob("fedavg*")))
    assert "fedhm was run with the seeds 0, fedavg with 0, 1" in sentence


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = begin(out, "fedhm", "fedavg", "lowrank:1/8", rounds=400)
    wait_for_rounds(out / "fedavg-seed0", 2, process)
    assert processes_in(out)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "\nfedhm: stopped; the same command resumes what is missing\n"
    assert processes_in(out) == []
    done = len((out / "fedavg-seed0" / "records.jsonl").read_text().splitlines())
    assert done >= 2
    process = begin(out, "fedhm", "fedavg", "lowrank:1/8", rounds=400)
    wait_for_rounds(out / "fedavg-seed0", done + 1, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert processes_in(out) == []


@pytest.mark.slow
def test_a_run_that_is_killed_is_named_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    process = begin(out, "fedavg", "lowrank:1/8", rounds=12)
    wait_for_rounds(out / "fedavg-seed0", 1, process)
    (victim,) = processes_in(out / "fedavg-seed0")
    os.kill(victim, signal.SIGKILL)
    said, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err == "fedhm: fedavg-seed0 failed: it was ended by SIGKILL\n"
    assert "lowrank-1-8-seed0 done" in said
    assert "│ 1/8" in said
    again = [*("compare", "digits", "--methods", "fedavg,lowrank:1/8", "--seeds", "1", "--jobs", "2")]
    assert main([*again, "--set", *SMALL, "train.rounds=12", "--out", str(out)]) == 0
    said, err = capsys.readouterr()
    assert err == ""
    assert "fedavg-seed0 runs after round" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name a preset or a config file to compare methods on"),
        (["digit"], "did you mean 'digits'"),
        (["digits", "--methods", "fedhm,heteroflow"], "did you mean 'heterofl'"),
        (["digits", "--methods", ","], "there is no method to compare"),
        (["digits", "--methods", "lowrank:8"], "--methods lowrank:8: method.tiers.0: input should be less than"),
        (["digits", "--seeds", "0"], "--seeds takes a whole number from 1 on, not '0'"),
        (["digits", "--seeds", "three"], "--seeds takes a whole number from 1 on, not 'three'"),
        (["digits", "--jobs", "-1"], "--jobs takes a whole number from 1 on"),
        (["digits", "--setting", "wild"], "--setting takes fixed or dynamic, not 'wild'"),
        (["digits", "--data", "mnist"], "--data takes iid or dirichlet or dirichlet-feddf or by-tier, not 'mnist'"),
        (["digits", "--target", "90"], "--target takes an accuracy between 0 and 1, such as 0.9, not '90'"),
        (["digits", "--methods", "fedhm,lowrank", "--set", "method.keep=9"], "nothing to factorize for tier 1/2"),
        (["digits", "--methods", "fedhm-v3", "--set", "method.tiers=[1,1/2]"], "fedhm-v3 needs at least 3 tiers"),
        (["cifar10-small", "--methods", "fedavg", "--set", "data.folder=nowhere"], "cifar-10-binary.tar.gz"),
        (["digits", "--runs", "nowhere"], "leave 'digits' out"),
        (["--runs", "nowhere"], "there is no folder nowhere"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_runs(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in failure(capsys, "compare", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_else_is_not_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fedavg-seed0").mkdir()
    (tmp_path / "fedavg-seed0" / "thesis.tex").write_text("precious")
    message = failure(capsys, "compare", "digits", "--methods", "fedavg", "--seeds", "1", "--out", str(tmp_path))
    assert "holds other files" in message
    (tmp_path / "file").write_text("")
    assert "cannot make the folder" in failure(
        capsys, "compare", "digits", "--methods", "fedavg", "--out", str(tmp_path / "file")
    )


@pytest.mark.slow
def test_its_folder_is_reported_again(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    files = [out / name for name in ("report.html", "comparison.md", "comparison.csv")]
    expected = [file.read_text() for file in files]
    for file in files:
        file.unlink()
    assert main(["report", str(out)]) == 0
    assert "What each tier spent" in capsys.readouterr().out
    assert [file.read_text() for file in files] == expected  # by the same names, and the command that made it
    shutil.rmtree(out / "fedavg-seed1")  # what is not complete is left out
    assert main(["report", str(out), "--out", str(tmp_path / "other")]) == 0
    assert "lowrank:1/8" in (tmp_path / "other" / "comparison.csv").read_text()
    assert "fedavg" not in (tmp_path / "other" / "comparison.csv").read_text()


@pytest.mark.slow
def test_other_verbs_say_what_a_comparisons_folder_is(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = finished / "fedavg-seed0"
    for verb in ("export", "watch"):
        said = failure(capsys, verb, str(finished))
        assert f"{finished} is not the folder of a run: it holds runs, of which name one: {one}" in said
    said = failure(capsys, "resume", str(finished))
    assert "is the folder of a comparison, which the same command resumes: fedhm compare digits --methods" in said
    with no_figures():
        assert main(["report", str(finished), str(one), "--out", str(tmp_path / "report")]) == 0  # as runs/* names both
    assert f"{finished} is left out: it is a comparison" in capsys.readouterr().err


def test_folders_without_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not the folder of a run, and holds none" in failure(capsys, "compare", "--runs", str(tmp_path))
    (tmp_path / "table.md").write_text("")
    assert "there are no runs to compare" in failure(capsys, "compare", "--runs", str(tmp_path / "table.md"))


@pytest.mark.slow
def test_entries_with_declared_settings_run_and_stay_comparable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    methods = "fedhm-paper,fedhm-published,lowrank-published:1/8"
    arguments = ["compare", "digits", "--methods", methods, "--seeds", "1", "--setting", "dynamic"]
    assert main([*arguments, "--data", "dirichlet", "--out", str(out), "--set", *SMALL]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Other settings of fedhm-published, lowrank-published:1/8: train.clip_norm = 0" in said
    assert "train.decay_factors = true" in said
    ours, paper = (read_config(out / f"{name}-seed0") for name in ("fedhm-published", "fedhm-paper"))
    assert ours.data is not None
    assert paper.data is not None
    assert (ours.data.partition, paper.data.partition) == ("dirichlet-feddf", "dirichlet")
    assert (ours.evaluation.statistics, paper.evaluation.statistics) == ("test-batch", "stored")
    assert (ours.method.weighting, paper.method.weighting) == ("softmax-inverse", "softmax")  # type: ignore[attr-defined]
    lowrank = read_config(out / "lowrank-published-1-8-seed0")
    assert lowrank.method.aggregate == "factors"  # type: ignore[attr-defined]
    # the report of the folder, and that of its runs, know what was declared
    assert main(["report", str(out)]) == 0
    assert main(["compare", "--runs", str(out), "--out", str(tmp_path / "again")]) == 0
    assert main(["report", str(tmp_path / "again")]) == 0
    for folder in (out, tmp_path / "again"):
        assert "Other settings of fedhm-published" in (folder / "comparison.md").read_text()
    # without the comparison's own file, nothing is declared
    (out / "comparison.json").unlink()
    assert "cannot be compared" in failure(capsys, "compare", "--runs", str(out), "--out", str(tmp_path / "no"))
