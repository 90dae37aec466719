"""Reports on runs: tables, plots and a web page, and progress while a run goes on."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedhm.machine.memory import memory_errors

if TYPE_CHECKING:
    from fedhm.runs.history import Run

CHECKSUMS_FILE = "report.json"


@memory_errors("to write the report", "close other programs; the rounds are on disk")
def save_report(runs: "Sequence[Run]", folder: Path) -> list[Path]:
    """Write page, tables and plots of runs, and return their paths. Their checksums are written last."""
    # here, since the progress of a run needs none of this, and it takes a while to import
    from fedhm.machine.files import write_atomically
    from fedhm.machine.seal import write_checksums
    from fedhm.report.page import save_page
    from fedhm.report.plots import save_run_plots
    from fedhm.report.tables import report_csv, report_markdown

    (folder / CHECKSUMS_FILE).unlink(missing_ok=True)  # those of an earlier report
    write_atomically(folder / "report.md", report_markdown(runs))
    write_atomically(folder / "report.csv", report_csv(runs))
    plots = save_run_plots(runs, folder)
    written = [save_page(runs, folder), folder / "report.md", folder / "report.csv", *plots]
    write_checksums(folder / CHECKSUMS_FILE, written, runs[0].fingerprint if len(runs) == 1 else "")
    return written
