"""Reports name the metrics of a run's objective: of regression as of classification."""

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from fedhm.config.objective import Metric, Metrics
from fedhm.report import save_report
from fedhm.report.comparable import find_difference
from fedhm.report.progress import LiveBar, LogLines
from fedhm.report.tables import report_csv, report_markdown
from fedhm.runs.history import Run
from fedhm.server.record import Record
from made_runs import made_run

SIZES = {"full": 1000, "1/4": 300}
DONE = [{"full": 0.5, "1/4": -0.25}, {"full": 0.875, "1/4": 0.5}]


def classified(name: str = "classes") -> Run:
    return made_run(name, SIZES, DONE)


def regressed(name: str = "numbers") -> Run:
    return made_run(name, SIZES, DONE, objective={"name": "regression"})


def test_the_table_has_the_objectives_metrics_as_they_are_shown() -> None:
    assert report_markdown([classified()]).splitlines()[2:5] == [
        "| tier | parameters | MACs/sample | bytes/round | accuracy | best | loss |",
        "|---|--:|--:|--:|--:|--:|--:|",
        "| full | 1,000 | 7.0 k | 20.00 kB | 87.50 % | 87.50 % | 0.1250 |",
    ]
    assert report_markdown([regressed()]).splitlines()[2:5] == [
        "| tier | parameters | MACs/sample | bytes/round | r2 | best | mse |",
        "|---|--:|--:|--:|--:|--:|--:|",
        "| full | 1,000 | 7.0 k | 20.00 kB | 0.8750 | 0.8750 | 0.1250 |",
    ]


def test_the_best_round_of_every_tier_stands_beside_the_last() -> None:
    falling = made_run("falling", SIZES, [{"full": 0.9, "1/4": 0.25}, {"full": 0.5, "1/4": 0.75}])
    shown = [row.split(" | ")[4:6] for row in report_markdown([falling]).splitlines()[4:6]]
    assert shown == [["50.00 %", "90.00 %"], ["75.00 %", "75.00 %"]]
    assert "chosen by that metric and is optimistic" in report_markdown([falling])


def test_the_csv_has_a_column_for_each_metric() -> None:
    rows = list(csv.DictReader(io.StringIO(report_csv([regressed()]))))
    assert list(rows[0])[-2:] == ["r2", "mse"]
    assert (rows[1]["tier"], rows[1]["r2"], rows[1]["mse"]) == ("1/4", "-0.25", "1.25")


def test_the_plots_are_named_by_the_headline(tmp_path: Path) -> None:
    names = {path.name for path in save_report([regressed()], tmp_path)}
    assert names == {
        "report.html", "report.md", "report.csv", "r2-by-round.png", "r2-by-bytes.png", "r2-by-macs.png",
    }  # fmt: skip


@pytest.mark.slow
def test_runs_of_several_objectives_stand_in_one_report_that_says_so(tmp_path: Path) -> None:
    runs = [classified(), regressed()]
    assert find_difference(runs) == "classes has objective.name = classification, numbers has regression"
    text = report_markdown(runs)
    assert text.splitlines()[0].endswith("| accuracy | loss | r2 | mse | best |")
    assert "| 87.50 % | 0.1250 |  |  | 87.50 % |" in text
    assert "|  |  | 0.8750 | 0.1250 | 0.8750 |" in text
    assert text.endswith("\nNot comparable: classes has objective.name = classification, numbers has regression.\n")
    names = {path.name for path in save_report(runs, tmp_path)}
    assert {"accuracy-by-round.png", "r2-by-round.png", "accuracy-by-bytes.png", "r2-by-bytes.png"} < names


@pytest.mark.parametrize(
    ("metric", "line", "beside"),
    [
        (Metric("accuracy", percent=True), "round 2/4  full 87.5%  1/4 50.0%  0.0 s", "87.5/50.0%"),
        (Metric("r2"), "round 2/4  full 0.875  1/4 0.500  0.0 s", "0.875/0.500"),
    ],
)
def test_progress_shows_the_headline(metric: Metric, line: str, beside: str) -> None:
    record = Record(2, metrics={tier: Metrics({metric.name: value}) for tier, value in DONE[1].items()})
    out = io.StringIO()
    lines = LogLines(Console(file=out, width=80), metric)
    lines.started(0, 4)
    lines.round_done(record)
    assert out.getvalue() == f"{line}\n"
    out = io.StringIO()
    with LiveBar(Console(file=out, force_terminal=True, width=80), metric) as bar:
        bar.started(0, 4)
        bar.task_done(1, "statistics", 3, 8)
        bar.round_done(record)
    assert beside in out.getvalue()
    assert "BN 3/8" not in out.getvalue().splitlines()[-1]
