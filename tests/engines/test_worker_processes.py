"""`fedhm run` with workers, stopped in every way that processes can be: none of them is left."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import forked
from fedhm.cli import main
from fedhm.runs.folder import RunFolder, read_config, rounds_done
from run_outcome import outcome

SMALL = ["train.epochs=1", "model.width=0.25", "federation.clients=8", "evaluation.every=4"]
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@pytest.fixture
def process(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A long run with two workers in a process group of its own, after some rounds."""
    settings = [*SMALL, "train.rounds=500", "engine.workers=2"]
    command = ["run", "digits", "--set", *settings, "--out", str(tmp_path / "run")]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    started = forked.fedhm(command, **streams, start_new_session=True)
    try:
        while started.poll() is None and rounds_done(tmp_path / "run") < 2:
            time.sleep(0.02)
        yield started
    finally:
        started.kill()
        started.wait()
        assert started.stderr is not None
        started.stderr.close()


def workers_of(group: int) -> list[int]:
    """The processes of a group but for its leader; one that ended and waits for its parent is none."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, of = (path / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # ended just now
        if int(of) == group and state != "Z" and int(path.name) != group:
            found.append(int(path.name))
    return found


def assert_none_left(group: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while workers_of(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers_of(group) == []


@pytest.mark.slow
@needs_proc
def test_ctrl_c_reaches_all_and_leaves_none(process: "subprocess.Popen[str]", tmp_path: Path) -> None:
    assert len(workers_of(process.pid)) == 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip() == f"fedhm: stopped; 'fedhm resume {tmp_path / 'run'}' resumes from the last complete round"
    assert workers_of(process.pid) == []


@pytest.mark.slow
@needs_proc
def test_workers_outlive_neither_a_killed_parent_nor_its_lock(process: "subprocess.Popen[str]", tmp_path: Path) -> None:
    assert len(workers_of(process.pid)) == 2
    process.kill()
    process.wait()
    with RunFolder.open(tmp_path / "run"):
        pass  # at once: workers do not hold the lock
    assert_none_left(process.pid, 10)


@pytest.mark.slow
@needs_proc
def test_a_killed_worker_ends_the_run_in_a_sentence(process: "subprocess.Popen[str]") -> None:
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.startswith("fedhm: a worker process was killed by signal 9")
    assert "Traceback" not in said
    assert workers_of(process.pid) == []


@pytest.mark.slow
@needs_proc
@pytest.mark.usefixtures("without_figures")
def test_a_stopped_run_ends_the_same_with_other_workers(tmp_path: Path) -> None:
    settings = [*SMALL, "train.rounds=12"]
    command = ["run", "digits", "--out", str(tmp_path / "run"), "--set", *settings, "engine.workers=3"]
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = forked.fedhm(command, **nowhere, start_new_session=True)
    while process.poll() is None and rounds_done(tmp_path / "run") < 3:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 130
    assert rounds_done(tmp_path / "run") < 12
    assert main(["resume", str(tmp_path / "run"), "--workers", "2"]) == 0
    assert read_config(tmp_path / "run").engine.workers == 3
    assert main(["run", "digits", "--set", *settings, "engine.workers=1", "--out", str(tmp_path / "whole")]) == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.usefixtures("without_figures")
def test_the_number_of_workers_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", "--set", "engine.workers=0", "--out", str(tmp_path / "run")]) == 1
    assert "engine.workers: input should be greater than or equal to 1" in capsys.readouterr().err
    assert main(["run", "digits", "--set", "train.rounds=1", *SMALL, "--out", str(tmp_path / "run")]) == 0
    assert main(["resume", str(tmp_path / "run"), "--workers", "few"]) == 1
    assert "--workers takes a whole number from 1 to 1024, or auto, not 'few'" in capsys.readouterr().err
