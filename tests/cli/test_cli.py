"""The command line, as a user meets it."""

import io
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

import fedhm
from conftest import no_figures, small_model
from fedhm.cli import main
from fedhm.config.objective import Metric, Metrics
from fedhm.data.federation import Federation
from fedhm.report.progress import LiveBar
from fedhm.server.record import Record
from run_outcome import edit_sealed

QUICK = ["train.rounds=3", "train.epochs=1", "model.width=0.25", "federation.clients=8", "evaluation.every=1"]
QUICK += ["data.train_samples=400"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "quick"
    assert main(["run", "digits", "--set", *QUICK, "--out", str(folder)]) == 0
    return folder


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Exit code 1, one paragraph on stderr, no traceback."""
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert not out or out.startswith("reading ")
    assert err.startswith("fedhm: ")
    assert "Traceback" not in err
    return err


@pytest.mark.slow
def test_a_run_leaves_everything_in_its_folder(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == {
        ".lock", "config.toml", "records.jsonl", "tiers.json", "data.json", "checkpoints", "models",
        "report.html", "report.md", "report.csv", "report.json", "accuracy-by-round.png", "accuracy-by-bytes.png",
        "accuracy-by-macs.png", "energy-beyond-rank.png",
    }  # fmt: skip
    assert {path.name for path in (finished / "models").iterdir()} == {
        "full.safetensors", "1-2.safetensors", "1-4.safetensors", "1-8.safetensors",
    }  # fmt: skip
    assert len((finished / "records.jsonl").read_text().splitlines()) == 3
    for name in ("accuracy-by-round.png", "accuracy-by-bytes.png", "accuracy-by-macs.png", "energy-beyond-rank.png"):
        with Image.open(finished / name) as picture:
            assert picture.width > 600
            assert len(picture.convert("RGB").getcolors(2**24) or []) > 50  # something is drawn


@pytest.mark.usefixtures("without_figures")
def test_the_table_has_a_row_for_each_tier(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(finished)]) == 0
    out = capsys.readouterr().out
    for tier in ("full", "1/2", "1/4", "1/8"):
        assert re.search(rf"│ {tier} +│ +[\d,]+ │ +[\d.]+ [kM] │ +[\d.]+ kB │ +\d+\.\d\d % │", out), out


@pytest.mark.slow
def test_several_runs_side_by_side(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    other = tmp_path / "fedavg"
    arguments = ["run", "digits", "--set", *QUICK, "method.name=fedavg", "--out", str(other)]
    with no_figures():
        assert main(arguments) == 0
    assert main(["report", str(finished), str(other), "--out", str(tmp_path / "both")]) == 0
    out = capsys.readouterr().out
    for run, method, tier in (("quick", "fedhm", "1/8"), ("fedavg", "fedavg", "full")):
        assert re.search(rf"│ {run} +│ {method} +│ +3/3 │ {tier} ", out), out
    monkeypatch.setenv("COLUMNS", "80")
    with no_figures():
        assert main(["report", str(finished), str(other), "--out", str(tmp_path / "both")]) == 0
    assert "fedavg: fedavg, round 3/3" in capsys.readouterr().out
    csv = (tmp_path / "both" / "report.csv").read_text().splitlines()
    assert len(csv) == 1 + 3 * 4 + 3
    assert (tmp_path / "both" / "accuracy-by-bytes.png").exists()


@pytest.mark.usefixtures("without_figures")
def test_the_report_of_all_folders_leaves_out_what_is_no_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "a")
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare" / "comparison.json").write_text("{}")
    (tmp_path / "report").mkdir()
    (tmp_path / "notes.txt").touch()
    assert main(["report", *map(str, sorted(tmp_path.iterdir())), "--out", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "report.md").exists()
    err = capsys.readouterr().err
    comparison = tmp_path / "compare"
    assert f"{comparison} is left out: it is a comparison, which 'fedhm report {comparison}' shows" in err
    assert f"{tmp_path / 'notes.txt'} is left out: it is not the folder of a run" in err
    said = failure(capsys, "report", str(comparison), str(tmp_path / "notes.txt"))
    assert said.endswith("there is no run among these folders\n")
    assert "there is no folder" in failure(capsys, "report", str(tmp_path / "a"), str(tmp_path / "misspelt"))


@pytest.mark.usefixtures("without_figures")
def test_a_finished_run_can_be_resumed_and_not_overwritten(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(finished)]) == 0
    capsys.readouterr()
    assert "holds a run already: resume it with 'fedhm resume" in failure(
        capsys, "run", "digits", "--out", str(finished)
    )


@pytest.mark.parametrize("method", ["heterofl", "fedmd", "feddf"])
def test_sizes_of_widths(capsys: pytest.CaptureFixture[str], method: str) -> None:
    assert main(["sizes", "digits", "--set", f"method.name={method}"]) == 0
    assert re.search(r"w0\.35 │ +13,873 │", capsys.readouterr().out)


def test_sizes_of_split_mix_hold_one_base_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizes", "digits", "--set", "method.name=splitmix"]) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines() if "x0.35" in line]
    assert len({row[-2] for row in rows}) == 1  # training memory
    sent = [float(row[4]) for row in rows]  # kB each way
    assert sent == pytest.approx([sent[-1] * count for count in (9, 3, 2, 1)], rel=1e-3)


def test_sizes_count_what_is_trained_inside(capsys: pytest.CaptureFixture[str]) -> None:
    for settings, full in (
        (["train.nested=0.5"], 625.9 + 97.5),
        (["train.nested=0.25", "train.nested_form=instead"], None),
    ):
        assert main(["sizes", "digits", "--set", *settings]) == 0
        lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
        rows = {line[0]: line for line in lines if line and line[0] in {"full", "1/8"}}
        expected = full or 0.75 * 625.9 + 0.25 * 97.5  # thousands: both on every batch, or one of them
        assert float(rows["full"][4]) == pytest.approx(expected, abs=0.11)
        assert rows["1/8"][2:4] == rows["1/8"][4:6]


def test_sizes_tell_the_memory_of_the_configs_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    memory: dict[str, float] = {}
    for optimizer in ("sgd", "adamw"):
        assert main(["sizes", "digits", "--set", f"train.optimizer={optimizer}"]) == 0
        (row,) = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines() if "│ full" in line]
        memory[optimizer] = float(row[-2])
    copy = 4 * 110_698 / 1e6  # MB, of the parameters
    assert copy - 0.01 < memory["adamw"] - memory["sgd"] < 1.5 * copy  # one more, and what passes while it steps


@pytest.mark.usefixtures("without_figures")
def test_a_run_from_python_is_resumed_there(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train": {"rounds": 1}, "engine": {"threads": 1}}
    fedhm.run(small_model(), federation.clients, federation.test, settings, tmp_path / "run")
    sentence = failure(capsys, "resume", str(tmp_path / "run"))
    assert "it was started from Python with its own data, and is resumed there, by fedhm.run" in sentence


@pytest.mark.slow
def test_sizes_need_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizes", "cifar10-resnet18", "--set", "train.batch=2"]) == 0
    out = capsys.readouterr().out
    for parameters, macs in (
        ("11,173,962", "555.4"),
        ("4,157,514", "259.7"),
        ("2,209,866", "171.6"),
        ("1,236,042", "127.6"),
    ):
        assert re.search(rf"{parameters} │ +{macs} M │ +[\d.]+ MB │ +[\d.]+ MB", out), out


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "digit"], "did you mean 'digits'"),
        (["run", "digits", "--set", "train.lrr=1"], "did you mean 'train.lr'"),
        (["run", "cifar10-resnet18", "--set", "data.folder=nowhere"], "cifar-10-binary.tar.gz"),
        (["run", "digits", "--set", "method.tiers=[0.0]"], "greater than 0"),
        (["run", "digits", "--set", "method.keep=9"], "nothing to factorize for tier 1/2"),
        (["run", "digits", "--set", "federation.clients=5000"], "5000 clients cannot share"),
        (["run", "digits", "--set", "data.partition=dirichlet-unequal", "data.alpha=0.0001"], "has no samples"),
        (["run", "digits", "--set", "data.source=digitz"], "'digits'"),
        (["run", "--set", "train.lr=1", "digits"], "put the preset before --set"),
        (["resume", "nowhere"], "is not the folder of a run"),
        (["report", "nowhere"], "there is no folder nowhere"),
        (["sizes", "none.toml"], "cannot read none.toml"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_nothing_is_left_behind(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in failure(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_diverges_at_once_says_so_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "run")
    assert main(["run", "digits", "--set", *QUICK, "train.lr=1e30", "--out", folder]) == 1
    err = capsys.readouterr().err
    assert re.search(r"client \d+ \(tier .*\) in round 1 cannot be used: its loss became NaN", err)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_that_fails_loses_nothing(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (".lock", "config.toml", "tiers.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    (tmp_path / "records.jsonl").write_text("damaged\n")  # and its checkpoints are gone
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "is not a round's record" in failure(capsys, "resume", str(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    command = f"{sys.executable} -m fedhm run digits --set {' '.join(QUICK)} --out {tmp_path}/run | head -1"
    assert subprocess.run(command, shell=True, check=True, capture_output=True).stderr == b""
    assert (tmp_path / "run" / "report.md").exists()
    assert len((tmp_path / "run" / "records.jsonl").read_text().splitlines()) == 3


def test_a_folder_with_other_files_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    assert "holds other files" in failure(capsys, "run", "digits", "--out", str(tmp_path))


def test_the_narrow_terminal_shows_round_and_accuracy() -> None:
    out = io.StringIO()
    with LiveBar(Console(file=out, force_terminal=True, width=80), Metric("accuracy", percent=True)) as bar:
        bar.started(0, 40)
        metrics = {tier: Metrics(accuracy=0.9915, loss=0.1) for tier in ("full", "1/2", "1/4", "1/8")}
        bar.round_done(Record(37, metrics=metrics))
    shown = re.sub(r"\x1b\[[\d;?]*\w", "", out.getvalue())
    assert re.search(r"round 37/40 ━.* left .*99\.2/99\.2/99\.2/99\.2%", shown)


def test_damaged_folders_are_told_apart(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.toml").write_bytes((finished / "config.toml").read_bytes()[:70])
    assert "config.toml" in failure(capsys, "resume", str(damaged))
    (damaged / "config.toml").write_bytes((finished / "config.toml").read_bytes())
    edit_sealed(damaged / "config.toml", ("seed = 0", "seed = 1"))
    (damaged / "checkpoints").mkdir()
    checkpoint = max((finished / "checkpoints").iterdir())
    (damaged / "checkpoints" / checkpoint.name).write_bytes(checkpoint.read_bytes())
    assert main(["resume", str(damaged)]) == 1
    assert "belongs to another run" in capsys.readouterr().err


def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["walk"], ["run", "digits", "--colour"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert "usage: fedhm" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_stops_cleanly_and_the_bar_was_shown(tmp_path: Path) -> None:
    """On a real pseudo-terminal: the live bar, then Ctrl-C, a sentence, exit code 130, and resume works."""
    folder = tmp_path / "run"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fedhm", "run", "digits", "--set", *QUICK, "train.rounds=500", "--out", str(folder)],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "140"},
    )  # fmt: skip
    os.close(theirs)
    screen = bytearray()
    reader = threading.Thread(target=_read_all, args=(ours, screen))  # a terminal that nobody reads blocks its writer
    reader.start()
    try:
        while process.poll() is None and not list((folder / "checkpoints").glob("*.safetensors")):
            time.sleep(0.02)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        reader.join()
    text = screen.decode()
    assert "round" in text
    assert "━" in text
    assert "resumes from the last complete round" in text
    assert "Traceback" not in text


def _read_all(terminal: int, screen: bytearray) -> None:
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # how a terminal says that the other side is gone
            break
        if not part:
            break
        screen.extend(part)
    os.close(terminal)
