"""Runs from Python are compared by what their folders say of the data."""

from pathlib import Path

import pytest
import torch

import fedhm
from conftest import small_model
from fedhm.compare.report import ComparisonReport
from fedhm.compare.results import read_entries
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.runs.folder import read_data_facts

pytestmark = pytest.mark.usefixtures("without_figures")  # of the single runs
SETTINGS = {"train": {"rounds": 1, "batch": 8, "lr": 0.05}, "engine": {"threads": 1}}


def run(federation: Federation, out: Path, method: dict[str, object], seed: int = 0) -> None:
    settings = {**SETTINGS, "method": method, "seed": seed}
    fedhm.run(small_model(), federation.clients, federation.test, settings, out)


@pytest.mark.slow
def test_runs_that_differ_only_in_their_seed_are_one_entry(federation: Federation, tmp_path: Path) -> None:
    for seed in (0, 1):
        run(federation, tmp_path / f"ours-seed{seed}", {"name": "fedhm"}, seed)
        run(federation, tmp_path / f"theirs-seed{seed}", {"name": "fedavg"}, seed)
    entries = read_entries([tmp_path])
    assert [(entry.label, entry.seeds) for entry in entries] == [("ours", [0, 1]), ("theirs", [0, 1])]
    written = ComparisonReport(entries, "fedhm compare --runs", {}).save(tmp_path / "comparison")
    assert "cost-to-target.png" in {path.name for path in written}


def test_other_data_are_found_out(federation: Federation, tmp_path: Path) -> None:
    run(federation, tmp_path / "ours", {"name": "fedhm"})
    facts = read_data_facts(tmp_path / "ours")
    assert facts is not None
    assert (facts.classes, facts.input_shape, facts.clients, facts.samples) == (4, (1, 6, 6), 8, 160)
    samples = federation.clients[0]
    changed = [(samples.inputs, torch.roll(samples.labels, 1)), *federation.clients[1:]]
    settings = {**SETTINGS, "method": {"name": "fedavg"}}
    fedhm.run(small_model(), changed, federation.test, settings, tmp_path / "theirs")
    with pytest.raises(FedhmError, match="cannot be compared: ours has data digest with seed 0 = "):
        ComparisonReport(read_entries([tmp_path]), "…", {})


def test_runs_of_the_same_name_are_told_apart(federation: Federation, tmp_path: Path) -> None:
    run(federation, tmp_path / "a" / "run", {"name": "fedhm"})
    run(federation, tmp_path / "b" / "run", {"name": "fedavg"})
    labels = [entry.label for entry in read_entries([tmp_path / "a", tmp_path / "b" / "run"])]
    assert labels == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]
