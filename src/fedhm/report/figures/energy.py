"""The energy beyond each tier's rank by round: where its lines fall, the model shrinks to its small tiers."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter

from fedhm.report.figures.plots import STYLES, plain, tier_colours
from fedhm.runs.history import Run

DIAGNOSTIC = "energy_beyond/"  # followed by the tier
RESOLUTION = 1e-7  # of float32: smaller shares are rounding errors, and 0 has no place on a logarithmic axis


def save_collapse_plot(runs: Sequence[Run], path: Path) -> Path | None:
    """Write the plot as a PNG file, a colour for each tier and a style for each run; None if there is nothing."""
    styles = {run.name: STYLES[number % len(STYLES)] for number, run in enumerate(runs)}
    colours = tier_colours(runs)
    energies = {run.name: lines for run in runs if (lines := energies_by_tier(run))}
    if not energies:
        return None
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for name, lines in energies.items():
        for tier, line in lines.items():
            axes.plot(
                list(line),
                list(line.values()),
                linestyle=styles[name],
                color=colours[tier],
                marker="o" if len(line) < 3 else None,
                linewidth=1.6,
                alpha=0.85,
            )
    axes.set_yscale("log")
    lowest = min(energy for lines in energies.values() for line in lines.values() for energy in line.values())
    axes.set_ylim(min(lowest / 1.5, 0.09), 1)  # at least one decade, so that two ticks are labelled
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("round")
    axes.set_ylabel("squared norm beyond the tier's rank")
    axes.grid(alpha=0.3)
    drawn = [run for run in runs if run.name in energies]
    of_runs = [Line2D([], [], color="0.3", linestyle=styles[run.name], label=_label(run)) for run in drawn]
    tiers = {tier for lines in energies.values() for tier in lines}
    of_tiers = [Line2D([], [], color=colour, label=tier) for tier, colour in colours.items() if tier in tiers]
    figure.legend(handles=of_runs, loc="outside upper left", fontsize=8, frameon=False)
    axes.legend(handles=of_tiers, title="tier", fontsize=8)
    figure.savefig(path)
    return path


def energies_by_tier(run: Run) -> dict[str, dict[int, float]]:
    """Return by tier and round which share of the energy lies beyond the tier's rank."""
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    for record in run.records:
        for name, energy in record.diagnostics.items():
            if name.startswith(DIAGNOSTIC):
                lines[name.removeprefix(DIAGNOSTIC)][record.round] = max(energy, RESOLUTION)
    return lines


def _label(run: Run) -> str:
    remark = run.config.method.remark
    return f"{plain(run.name)} ({remark})" if remark else plain(run.name)
