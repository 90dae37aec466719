"""Reports on runs: tables, plots and a web page, and progress while a run goes on."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedhm.runs.history import Run


def save_report(runs: "Sequence[Run]", folder: Path) -> list[Path]:
    """Write page, tables and plots of runs, and return their paths."""
    # here, since the progress of a run needs none of this, and it takes a while to import
    from fedhm.machine.files import write_atomically
    from fedhm.report.page import save_page
    from fedhm.report.plots import save_run_plots
    from fedhm.report.tables import report_csv, report_markdown

    write_atomically(folder / "report.md", report_markdown(runs))
    write_atomically(folder / "report.csv", report_csv(runs))
    plots = save_run_plots(runs, folder)
    return [save_page(runs, folder), folder / "report.md", folder / "report.csv", *plots]
