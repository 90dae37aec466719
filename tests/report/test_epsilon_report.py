"""What reports and progress lines tell of a run's privacy."""

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from fedhm.report.plot import save_png
from fedhm.report.plots import epsilon_plot
from fedhm.report.progress import progress
from fedhm.report.tables import report_csv, run_caption
from fedhm.runs.history import Run
from made_runs import made_run


def private(noise: float = 2.0) -> Run:
    sections = {"privacy": {"clip": 0.5, "noise": noise}}
    run = made_run("hidden", {"full": 10}, [{"full": 0.5}, {"full": 0.6}], **sections)
    for number, record in enumerate(run.records, start=1):
        record.epsilon = 1.25 * number if noise else None
    return run


def open_run() -> Run:
    return made_run("open", {"full": 10}, [{"full": 0.5}, {"full": 0.6}])


def test_the_table_says_what_is_promised() -> None:
    assert "hidden: every client has ε = 2.5 at δ = 1e-05 of differential privacy, by noise 2 × 0.5 at the server." in (
        run_caption([private(), open_run()])
    )
    assert "open: every" not in run_caption([private(), open_run()])
    assert "so nothing is promised" in run_caption([private(noise=0.0)])


def test_a_column_for_plain_numbers_only_where_there_are_some() -> None:
    rows = list(csv.DictReader(io.StringIO(report_csv([private(), open_run()]))))
    assert [row["epsilon"] for row in rows] == ["1.25", "2.5", "", ""]
    assert "epsilon" not in report_csv([open_run()])


def test_a_plot_of_private_runs(tmp_path: Path) -> None:
    assert epsilon_plot([open_run()]) is None
    plot = epsilon_plot([private(), open_run()])
    assert plot is not None
    assert save_png([plot], tmp_path / "epsilon.png") == tmp_path / "epsilon.png"
    assert (tmp_path / "epsilon.png").stat().st_size > 1000


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_tells_epsilon(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    run = private()
    with progress(console, run.config.objective.headline) as bar:
        bar.started(0, 2)
        bar.round_done(run.records[1])
    assert "ε 2.5" in console.file.getvalue()  # type: ignore[attr-defined]
