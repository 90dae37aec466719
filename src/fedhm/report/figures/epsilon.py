"""What private runs promise: ε of differential privacy by round."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedhm.report.figures.plots import STYLES, plain
from fedhm.runs.history import Run


def save_epsilon_plot(runs: Sequence[Run], path: Path) -> Path | None:
    """Write the plot as a PNG file, a line for each private run; None if there is none."""
    private = [run for run in runs if any(record.epsilon is not None for record in run.records)]
    if not private:
        return None
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(private):
        counted = [(record.round, record.epsilon) for record in run.records if record.epsilon is not None]
        axes.plot(
            [round_number for round_number, _ in counted],
            [epsilon for _, epsilon in counted],
            linestyle=STYLES[number % len(STYLES)],
            marker="o" if len(counted) < 3 else None,
            linewidth=1.6,
            label=f"{plain(run.name)}, noise {run.config.privacy.noise:g}, δ = {run.config.privacy.delta:g}",
        )
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("round")
    axes.set_ylabel("ε of differential privacy, of every client")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path)
    return path
