"""`fedhm verify` says of every file of a run whether it is as the run wrote it."""

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedhm
from conftest import small_model
from fedhm.cli import main
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.machine.files import take_lock
from fedhm.runs.folder import LOCK
from fedhm.runs.rounds import append_record, chain_line, read_lines, read_records
from fedhm.runs.verify import verify_run

pytestmark = pytest.mark.usefixtures("without_figures")
SETTINGS: dict[str, Any] = {
    "federation": {"participation": 0.5},
    "train": {"rounds": 3, "batch": 8, "lr": 0.05},
    "engine": {"threads": 1},
    "stop": {"patience": 5},
}


def run(federation: Federation, out: Path, **sections: Any) -> Path:
    settings = {**SETTINGS, **sections}
    fedhm.run(small_model(), federation.clients, federation.test, settings, out)
    return out


def bad(path: Path) -> dict[str, str]:
    return {state.name: state.note for state in verify_run(path) if state.bad}


def test_an_intact_run_is_intact(federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(federation, tmp_path / "run")
    states = {state.name: state.state for state in verify_run(tmp_path / "run")}
    assert set(states.values()) == {"intact"}
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != LOCK]
    assert states.keys() == {path.relative_to(tmp_path / "run").as_posix() for path in files}
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert f"{len(states)} files checked, none is damaged" in capsys.readouterr().out


def test_plans_of_budgets_are_covered(federation: Federation, tmp_path: Path) -> None:
    path = run(federation, tmp_path / "run", method={"name": "fedhm", "tiers": [1, "parameters:1/8"]})
    assert bad(path) == {}
    plans = path / "plans.json"
    plans.write_bytes(plans.read_bytes().replace(b"1", b"2", 1))
    assert bad(path) == {"plans.json": "its checksum differs"}


def test_every_file_is_covered(federation: Federation, tmp_path: Path) -> None:
    run(federation, tmp_path / "run")
    rng = random.Random(0)
    for file in sorted(path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != LOCK):
        intact, name = file.read_bytes(), file.relative_to(tmp_path / "run").as_posix()
        for position in rng.sample(range(len(intact)), 6):
            damaged = bytearray(intact)
            damaged[position] ^= 1 << rng.randrange(8)
            file.write_bytes(damaged)
            assert name in bad(tmp_path / "run")
        file.unlink()
        assert name in bad(tmp_path / "run")
        file.write_bytes(intact)
    assert bad(tmp_path / "run") == {}


def test_damage_is_one_table_and_an_exit_code(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(federation, tmp_path / "run")
    (tmp_path / "run" / "tiers.json").unlink()
    (tmp_path / "run" / "notes.txt").write_text("my own")
    assert main(["verify", str(tmp_path / "run")]) == 1
    said = capsys.readouterr()
    assert "tiers.json" in said.out
    assert "missing" in said.out
    assert "not checked" in said.out
    assert "fedhm: 1 of " in said.err


def test_a_killed_round_is_no_damage(federation: Federation, tmp_path: Path) -> None:
    """The record of a round is written before its checkpoint. The report comes last."""
    path = run(federation, tmp_path / "run")
    for report in path.glob("report.*"):
        report.unlink()
    append_record(path / "records.jsonl", replace(read_records(path / "records.jsonl")[-1], round=4))
    assert bad(path) == {}
    append_record(path / "records.jsonl", replace(read_records(path / "records.jsonl")[-1], round=5))
    assert bad(path) == {"checkpoints/round-000005.safetensors": "the newest is that of round 3"}


def test_results_that_were_moved_aside_are_checked(federation: Federation, tmp_path: Path) -> None:
    path = run(federation, tmp_path / "run", checkpoints={"keep": "all"})
    settings = {**SETTINGS, "checkpoints": {"keep": "all"}}
    fedhm.run(small_model(), federation.clients, federation.test, settings, path, from_round=1)
    assert bad(path) == {}
    aside = path / "taken-back-1" / "records.jsonl"
    aside.write_bytes(aside.read_bytes().replace(b"0", b"1", 1))
    assert list(bad(path)) == ["taken-back-1/records.jsonl"]


def test_all_runs_in_a_folder_are_checked(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(federation, tmp_path / "all" / "a")
    shutil.copytree(tmp_path / "all" / "a", tmp_path / "all" / "b")
    (tmp_path / "all" / "b" / "data.json").write_text("{}")
    assert main(["verify", str(tmp_path / "all")]) == 1
    assert "2 of " not in capsys.readouterr().err


def test_a_run_among_others_that_lost_its_settings_is_found(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(federation, tmp_path / "all" / "a")
    shutil.copytree(tmp_path / "all" / "a", tmp_path / "all" / "b")
    (tmp_path / "all" / "b" / "config.toml").unlink()
    assert main(["verify", str(tmp_path / "all")]) == 1
    assert "fedhm: 1 of " in capsys.readouterr().err


def test_the_report_of_another_run_is_found(federation: Federation, tmp_path: Path) -> None:
    one, other = run(federation, tmp_path / "one"), run(federation, tmp_path / "other", seed=1)
    for file in other.glob("report.*"):
        shutil.copy(file, one / file.name)
    assert bad(one) == {"report.json": "it is the report of another run"}


def test_models_of_a_finished_run_must_be_there(federation: Federation, tmp_path: Path) -> None:
    path = run(federation, tmp_path / "run", stop={})
    for report in path.glob("report.*"):
        report.unlink()
    shutil.rmtree(path / "models")
    assert len(bad(path)) == 4


def test_nothing_is_written_to_what_is_checked(federation: Federation, tmp_path: Path) -> None:
    path = run(federation, tmp_path / "run")
    (path / LOCK).unlink()
    assert main(["verify", str(path)]) == 0
    assert not (path / LOCK).exists()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedhmError):
        verify_run(tmp_path)


def test_a_run_that_is_going_on_is_said_to_be(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run(federation, tmp_path / "run")
    lock = take_lock(path / LOCK)
    assert lock is not None
    assert main(["verify", str(path)]) == 0
    assert "a process is writing" in capsys.readouterr().out


# ---- records belong to their run ----


def test_records_of_another_seed_are_refused(federation: Federation, tmp_path: Path) -> None:
    one = run(federation, tmp_path / "one")
    other = run(federation, tmp_path / "other", seed=1)
    shutil.copy(other / "records.jsonl", one / "records.jsonl")
    with pytest.raises(FedhmError, match="holds the records of another run"):
        run(federation, one)
    assert bad(one)["records.jsonl"].endswith("with other settings, data or initial model")


def test_changed_records_of_past_rounds_are_refused(federation: Federation, tmp_path: Path) -> None:
    """Whoever computes the digests of a changed past again is found by the checkpoint, which names the last."""
    path = run(federation, tmp_path / "run")
    file = path / "records.jsonl"
    lines, chain = [], read_lines(file)[0].chain
    for number, line in enumerate(read_lines(file)):
        text = line.record.to_json()
        if number:
            content, chain = chain_line(text.replace('"loss": ', '"loss": 1', 1), chain)
            lines.append(content + b"\n")
        else:
            lines.append(line.content + b"\n")
    file.write_bytes(b"".join(lines))
    with pytest.raises(FedhmError, match="holds other records than the checkpoint of round 3 has seen"):
        run(federation, path)
    assert "it has seen other records" in " ".join(bad(path).values())


def test_lines_on_disk_are_never_rewritten(federation: Federation, tmp_path: Path) -> None:
    """Whole numbers among the diagnostics stay whole, whatever a later version would write."""
    path = run(federation, tmp_path / "run")
    before = (path / "records.jsonl").read_bytes()
    run(federation, path)
    assert (path / "records.jsonl").read_bytes() == before
    (path / "records.jsonl").write_bytes(before + b'{"round": 4, "unfini')
    run(federation, path)
    assert (path / "records.jsonl").read_bytes() == before
