"""Reports on runs: tables, plots and a web page, and progress while a run goes on."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedhm.runs.history import Run


def save_report(runs: "Sequence[Run]", folder: Path) -> list[Path]:
    """Write page, tables and plots, and return their paths."""
    from fedhm.machine.files import write_atomically
    from fedhm.report.figures.client_plot import save_client_plots
    from fedhm.report.figures.energy import save_collapse_plot
    from fedhm.report.figures.epsilon import save_epsilon_plot
    from fedhm.report.figures.plots import save_plots
    from fedhm.report.page import save_page
    from fedhm.report.tables import as_csv, markdown

    write_atomically(folder / "report.md", markdown(runs))
    write_atomically(folder / "report.csv", as_csv(runs))
    plots = [*save_plots(runs, folder), *save_client_plots(runs, folder)]
    if collapse := save_collapse_plot(runs, folder / "energy-beyond-rank.png"):
        plots.append(collapse)
    if promised := save_epsilon_plot(runs, folder / "epsilon-by-round.png"):
        plots.append(promised)
    return [save_page(runs, folder), folder / "report.md", folder / "report.csv", *plots]
