"""What records tell beside the metrics, by round: the spectrum, and ε of private runs."""

from collections.abc import Sequence

from fedhm.report.figures.energy import energies_by_tier
from fedhm.report.page.content.curves import hex_colours
from fedhm.report.page.plot import Line, Plot, ends
from fedhm.runs.history import Run

RUN_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")


def spectrum(runs: Sequence[Run]) -> Plot | None:
    """Return the energy beyond each tier's rank; None where no run's method knows it."""
    colours = hex_colours(runs)
    lines: list[Line] = []
    for number, run in enumerate(runs):
        for tier, found in energies_by_tier(run).items():
            label = f"{run.name}, {tier}" if len(runs) > 1 else tier
            percent = [100 * energy for energy in found.values()]
            lines.append(
                Line(label, list(found), percent, colours.get(tier, "#888888"), number, run=run.name, tier=tier)
            )
    if not lines:
        return None
    return Plot(
        title="energy beyond each rank by round",
        x_label="round",
        y_label="squared norm beyond the tier's rank (%)",
        lines=lines,
        summary="The share of the model's squared norm that lies beyond each tier's rank, by round, on a logarithmic "
        f"axis: where lines fall, the model shrinks to its small tiers. They end at: {ends(lines, 3)}.",
        log_y=True,
        whole_x=True,
        together=True,
    )


def privacy(runs: Sequence[Run]) -> Plot | None:
    """Return ε by round; None where no run is private."""
    lines: list[Line] = []
    for number, run in enumerate(runs):
        counted = [(record.round, record.epsilon) for record in run.records if record.epsilon is not None]
        if counted:
            label = f"{run.name}, noise {run.config.privacy.noise:g}, δ = {run.config.privacy.delta:g}"
            rounds, epsilons = zip(*counted, strict=True)
            colour = RUN_COLOURS[number % len(RUN_COLOURS)]
            lines.append(Line(label, rounds, epsilons, colour, number, run=run.name))
    if not lines:
        return None
    return Plot(
        title="ε by round",
        x_label="round",
        y_label="ε of differential privacy, of every client",
        lines=lines,
        summary=f"What private runs promise every client, by round. ε ends at: {ends(lines, 3)}.",
        whole_x=True,
        together=True,
    )
