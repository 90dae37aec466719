"""A finished run can get more rounds, and ends as if it had been started with them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fedhm
from conftest import no_figures
from fedhm.cli import main
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.runs.folder import RunFolder, read_config
from fedhm.runs.history import read_runs
from small import small_model

DIGITS = ["train.rounds=2", "federation.clients=4", "data.train_samples=100", "engine.threads=1", "engine.workers=1"]
SETTINGS: dict[str, Any] = {"train": {"rounds": 2, "lr": 0.05}, "engine": {"threads": 1, "server_threads": 1}}


def cli_run(folder: Path, *changes: str) -> int:
    return main(["run", "digits", *(part for c in (*DIGITS, *changes) for part in ("--set", c)), "--out", str(folder)])


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes()[-2000:] for path in sorted((folder / "models").iterdir())}


@no_figures()
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_run(tmp_path / "short") == 0
    before = (tmp_path / "short" / "records.jsonl").read_text()
    assert main(["resume", str(tmp_path / "short"), "--rounds", "4"]) == 0
    assert cli_run(tmp_path / "long", "train.rounds=4") == 0
    short, long = (read_runs([tmp_path / name])[0] for name in ("short", "long"))
    assert (tmp_path / "short" / "records.jsonl").read_text().startswith(before)
    assert [r.metrics for r in short.records] == [r.metrics for r in long.records]
    assert weights(tmp_path / "short") == weights(tmp_path / "long")
    assert (short.config.train.rounds, short.config.train.begun_rounds) == (4, 2)
    assert main(["verify", str(tmp_path / "short")]) == 0
    assert main(["resume", str(tmp_path / "short"), "--rounds", "5"]) == 0
    assert read_config(tmp_path / "short").train.begun_rounds == 2
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "short"), "--rounds", "3"]) == 1
    assert "has 5 rounds, and a run can only become longer" in capsys.readouterr().err


@no_figures()
def test_from_python(federation: Federation, tmp_path: Path) -> None:
    def run(rounds: int, folder: str) -> fedhm.Result:
        settings = {**SETTINGS, "train": {**SETTINGS["train"], "rounds": rounds}}
        return fedhm.run(small_model(), federation.clients, federation.test, settings, tmp_path / folder)

    run(1, "short")
    run(2, "short")
    short, long = run(3, "short"), run(3, "long")
    assert len(short.records) == 3
    for name, tensor in long.networks["full"].state_dict().items():
        assert torch.equal(tensor, short.networks["full"].state_dict()[name])
    with pytest.raises(FedhmError, match=r"holds a run with other settings, train\.rounds = 1, not 2|train\.rounds"):
        run(2, "short")


@no_figures()
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": {"rounds": 2, "schedule": "cosine"}}, "ends with round 2"),
        ({"train": {"rounds": 3}, "stop": {"target": 0.0}}, "stopped early"),
    ],
)
def test_refused(federation: Federation, tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    fedhm.run(small_model(), federation.clients, federation.test, SETTINGS | changes, tmp_path / "run")
    with RunFolder.open(tmp_path / "run") as folder, pytest.raises(FedhmError, match=sentence):
        folder.lengthen(5)
    assert read_config(tmp_path / "run").train.begun_rounds == 0
