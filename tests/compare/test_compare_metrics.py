"""A comparison by another metric than accuracy, also by one of which less is better."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from fedhm.compare.command import _show
from fedhm.compare.report import ComparisonReport
from fedhm.compare.results import EntryRuns, common_target, costs_to_reach
from fedhm.compare.tables import arrange_table, comparison_csv, cost_sheet, metric_sheet
from fedhm.config.objective import Metric
from fedhm.errors import FedhmError
from fedhm.objectives.regression import Regression
from made_runs import made_run

SIZES = {"full": 1000, "1/4": 300}


def fedhm(*curves: tuple[float, ...]) -> EntryRuns:
    """The small tier is a tenth below."""
    headlines = [[{"full": value, "1/4": value - 0.1} for value in curve] for curve in curves]
    return _runs("fedhm", SIZES, headlines, {"name": "fedhm"})


def fedavg(*curves: tuple[float, ...]) -> EntryRuns:
    return _runs("fedavg", {"full": 1000}, [[{"full": v} for v in curve] for curve in curves], {"name": "fedavg"})


def _runs(label: str, sizes: dict[str, int], curves: list[list[dict[str, float]]], method: dict[str, str]) -> EntryRuns:
    objective = {"name": "regression"}
    runs = [
        made_run(f"{label}-seed{seed}", sizes, curve, method, seed, objective=objective)
        for seed, curve in enumerate(curves)
    ]
    return EntryRuns(label, runs)


class ByError(Regression):
    metrics: ClassVar = (Metric("mse", more_is_better=False), Metric("r2"))


def by_error(entry: EntryRuns) -> EntryRuns:
    """The same runs, told by their mean squared error: 1 − R² of the made-up ones."""
    runs = [replace(r, config=r.config.model_copy(update={"objective": ByError()})) for r in entry.runs]
    return EntryRuns(entry.label, runs)


ENTRIES = [fedhm((0.5, 0.7, 0.8), (0.6, 0.85, 0.9)), fedavg((0.7, 0.9, 0.95), (0.7, 0.75, 0.95))]


def test_tables_have_the_objectives_metrics() -> None:
    sheet = metric_sheet(arrange_table(ENTRIES), seeds=2)
    assert list(sheet.rows) == [
        [
            *("full", "1.0 k: 0.8500 ± 0.0707 (best 0.8500 ± 0.0707)"),
            "1.0 k ×2: 0.9500 ± 0.0000 (best 0.9500 ± 0.0000)",
        ],
        ["1/4", "300: 0.7500 ± 0.0707 (best 0.7500 ± 0.0707)", ""],
    ]
    assert sheet.note.startswith("Parameters, and test r2 after the last round, mean ± deviation over 2 seeds. ")
    assert cost_sheet(ENTRIES).columns[-1] == "r2"
    rows = list(csv.DictReader(io.StringIO(comparison_csv(ENTRIES))))
    assert list(rows[0])[-2:] == ["r2", "mse"]
    assert (rows[0]["r2"], rows[0]["mse"]) == ("0.5", "0.5")


@pytest.mark.slow
def test_the_whole_report_speaks_of_the_metric(tmp_path: Path) -> None:
    out = io.StringIO()
    _show(ComparisonReport(ENTRIES, "fedhm compare mine.toml", {}), tmp_path, Console(file=out, width=150))
    _show(ComparisonReport(ENTRIES[:1], "fedhm compare mine.toml", {}), tmp_path / "one", Console(file=out, width=80))
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "convergence-smallest.png", "r2-by-communication.png", "r2-by-computation.png", "cost-to-target.png",
    }  # fmt: skip
    said = out.getvalue() + (tmp_path / "comparison.md").read_text()
    assert "Cost of r2 = 0.7" in said
    assert "What a target r2 costs is relative to the full model" in said
    assert "accuracy" not in said


def test_less_may_be_better() -> None:
    entries = [by_error(entry) for entry in ENTRIES]
    rows = list(metric_sheet(arrange_table(entries), seeds=2).rows)
    assert rows[0][1:] == [
        "1.0 k: 0.1500 ± 0.0707 (best 0.1500 ± 0.0707)",  # the smallest, not the largest
        "1.0 k ×2: 0.0500 ± 0.0000 (best 0.0500 ± 0.0000)",
    ]
    three = [by_error(fedhm((0.8,), (0.9,), (0.8,))), by_error(fedavg((0.95,), (0.95,), (0.95,)))]
    row, _ = metric_sheet(arrange_table(three), seeds=3).rows
    assert ["**" in cell for cell in row] == [False, False, True]
    assert common_target(entries) == pytest.approx(0.3)  # what the small tier of fedhm reaches with its worse seed
    fast = {(r.entry.label, r.tier): r for r in costs_to_reach(0.31, entries, entries[1])}
    slow = {(r.entry.label, r.tier): r for r in costs_to_reach(0.69, ENTRIES, ENTRIES[1])}
    assert {key: (r.communication, r.computation) for key, r in fast.items()} == {
        key: (r.communication, r.computation) for key, r in slow.items()
    }
    assert {r.communication for r in costs_to_reach(0.01, entries, entries[1])} == {None}


@pytest.mark.parametrize(
    ("value", "expected"), [(0.4321, 0.43), (0.04321, 0.043), (-0.4321, -0.44), (43.21, 43), (4321.0, 4300), (0.0, 0.0)]
)
def test_a_common_target_is_a_round_number_that_is_reached(value: float, expected: float) -> None:
    assert common_target([fedavg((value,))]) == pytest.approx(expected)
    assert common_target([by_error(fedavg((1 + value,)))]) == pytest.approx(-expected)  # its mse is −value


def test_a_common_target_is_reached_to_the_last_bit() -> None:
    for value in (0.7, 0.1 + 0.2, 0.7000000000000001, 0.6999999999999999):
        entry = by_error(fedavg((1 - value,)))
        assert entry.values(entry.first, "full")[1] <= common_target([entry])
        assert value >= common_target([fedavg((value,))])


def test_a_given_target_of_nothing_is_a_target() -> None:
    assert ComparisonReport(ENTRIES, "…", {}, given_target=0.0).target == 0


def test_other_objectives_are_not_comparable() -> None:
    other = EntryRuns(
        "classes", [made_run(f"classes-seed{s}", SIZES, [{"full": 0.5, "1/4": 0.5}] * 3, seed=s) for s in (0, 1)]
    )
    with pytest.raises(FedhmError, match=r"fedhm-seed0 has objective\.name = regression, classes-seed0 has classific"):
        ComparisonReport([ENTRIES[0], other], "…", {})
