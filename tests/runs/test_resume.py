"""An interrupted run goes on and ends as if nothing had happened, wherever it was interrupted."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedhm
import forked
from conftest import small_model
from fedhm.cli import main
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.machine import files
from fedhm.report.result import Result
from fedhm.runs.folder import RunFolder
from fedhm.server.record import Record
from run_outcome import outcome

SETTINGS: dict[str, dict[str, Any]] = {
    "federation": {"participation": 0.5},
    "train": {"rounds": 3, "batch": 8, "lr": 0.05},
    "evaluation": {"every": 2},
    "engine": {"threads": 1},
}
no_figures = pytest.mark.usefixtures("without_figures")


def run(federation: Federation, out: Path, model: nn.Module | None = None, **method: Any) -> Result:
    return fedhm.run(model or small_model(), federation.clients, federation.test, {**SETTINGS, "method": method}, out)


class KilledError(BaseException):
    """Stands for the end of the process: nothing catches it."""


def content(folder: Path) -> tuple[tuple[str, bytes], ...]:
    paths = sorted(folder.rglob("*"))
    return tuple((str(path.relative_to(folder)), path.read_bytes() if path.is_file() else b"") for path in paths)


@no_figures
@pytest.mark.slow
def test_a_run_killed_at_any_write_ends_the_same(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(federation, tmp_path / "whole")
    expected = outcome(tmp_path / "whole")
    left: list[Path] = []  # copies of a run's folder: what its process would leave if it were killed at that moment

    def copied_before(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left.append(tmp_path / f"left-{len(left)}")
            shutil.copytree(tmp_path / "run", left[-1])
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for place, name in ((os, "fsync"), (Path, "replace"), (files.Path, "unlink")):
            patch.setattr(place, name, copied_before(getattr(place, name)))
        run(federation, tmp_path / "run")
    assert len(left) > 20
    # between some of these moments nothing changes on disk, and what is the same goes on in the same way
    for folder in {content(folder): folder for folder in left}.values():
        run(federation, folder)
        assert outcome(folder) == expected
        assert not list(folder.rglob("*.tmp"))


@no_figures
@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        {"warmup": 2},
        {"name": "fedrolex", "tiers": [1, 0.5]},
        {"name": "fjord", "tiers": [1, 0.5]},
        {"name": "splitmix", "base": 0.5, "tiers": [3, 1]},
    ],
    ids=lambda method: method.get("name", "warm-up"),
)
def test_a_run_killed_between_rounds_ends_the_same(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    run(federation, tmp_path / "whole", **method)
    expected = outcome(tmp_path / "whole")
    commit = RunFolder.commit
    for last in (1, 2):

        def dying(folder: RunFolder, record: Record, *rest: Any, last: int = last) -> None:
            commit(folder, record, *rest)
            if record.round == last:
                raise KilledError

        folder = tmp_path / f"after-{last}"
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "commit", dying)
            with pytest.raises(KilledError):
                run(federation, folder, **method)
        run(federation, folder, **method)
        assert outcome(folder) == expected


@no_figures
def test_a_finished_run_can_be_asked_again(federation: Federation, tmp_path: Path) -> None:
    first = run(federation, tmp_path / "run")
    before = outcome(tmp_path / "run")
    (tmp_path / "run" / "models" / "1-8.safetensors").unlink()
    again = run(federation, tmp_path / "run")
    assert outcome(tmp_path / "run") == before
    assert again.records[-1].statistics == first.records[-1].statistics
    batch = torch.zeros(2, 1, 6, 6)
    assert torch.equal(again.networks["1/8"].eval()(batch), first.networks["1/8"].eval()(batch))


@no_figures
def test_a_saved_tier_is_loaded_into_any_instance_of_the_model(federation: Federation, tmp_path: Path) -> None:
    result = run(federation, tmp_path)
    batch = torch.rand(2, 1, 6, 6)
    for tier, file in (("full", "full"), ("1/8", "1-8")):
        network = fedhm.load_tier(tmp_path / "models" / f"{file}.safetensors", small_model(seed=5))
        assert torch.equal(network(batch), result.networks[tier].eval()(batch))
    with pytest.raises(FedhmError, match="cannot read"):
        fedhm.load_tier(tmp_path / "none.safetensors", small_model())
    with pytest.raises(FedhmError, match="not a tier's model"):
        fedhm.load_tier(max((tmp_path / "checkpoints").iterdir()), small_model())
    with pytest.raises(FedhmError, match=r"is of another model: it has no '10\.bias'"):
        fedhm.load_tier(tmp_path / "models" / "full.safetensors", nn.Sequential(*small_model(), nn.LayerNorm(4)))


@no_figures
def test_another_model_or_config_is_refused(federation: Federation, tmp_path: Path) -> None:
    run(federation, tmp_path)
    for other in (
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(128, 64), nn.Linear(64, 4)),
        nn.Sequential(*small_model(), nn.LayerNorm(4)),
        small_model(seed=1),
    ):
        with pytest.raises(FedhmError, match="belongs to another run, with other settings, data or initial model"):
            run(federation, tmp_path, other)
    fewer = replace(federation, test=federation.test.subset(torch.arange(10)))
    with pytest.raises(FedhmError, match="belongs to another run"):
        run(fewer, tmp_path)
    changed = {**SETTINGS, "seed": 1}
    with pytest.raises(FedhmError, match="holds a run with other settings"):
        fedhm.run(small_model(), federation.clients, federation.test, changed, tmp_path)


@no_figures
def test_two_processes_cannot_write_one_run(federation: Federation, tmp_path: Path) -> None:
    run(federation, tmp_path)
    with RunFolder.open(tmp_path), pytest.raises(FedhmError, match="another process is running"):
        run(federation, tmp_path)


@no_figures
def test_missing_records_are_noticed(federation: Federation, tmp_path: Path) -> None:
    run(federation, tmp_path)
    records = tmp_path / "records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[:1]))
    with pytest.raises(FedhmError, match="does not hold the 3 rounds"):
        run(federation, tmp_path)
    records.write_text("nonsense\n")
    with pytest.raises(FedhmError, match=r"line 1 of .* is not a round's record"):
        run(federation, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_9_from_the_shell(tmp_path: Path) -> None:
    settings = ["train.rounds=12", "train.epochs=1", "model.width=0.25", "federation.clients=8", "evaluation.every=4"]
    settings += ["data.train_samples=400"]

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        return forked.fedhm(arguments, stdout=subprocess.DEVNULL)

    assert main(["run", "digits", "--set", *settings, "--out", str(tmp_path / "whole")]) == 0

    folder = tmp_path / "killed"
    process = start("run", "digits", "--set", *settings, "--out", str(folder))
    try:
        for wanted in (1, 5):
            while process.poll() is None and not (folder / "checkpoints" / f"round-{wanted:06d}.safetensors").exists():
                time.sleep(0.001)
            time.sleep(0.01 * wanted)  # somewhere inside a later round
            process.kill()
            assert process.wait() == -signal.SIGKILL
            process = start("resume", str(folder))
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
    assert outcome(folder) == outcome(tmp_path / "whole")
