"""The headline metric by round, by bytes sent and by MACs computed, of one or several runs."""

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter
from matplotlib.typing import ColorType, LineStyleType

from fedhm.config.objective import Metric
from fedhm.runs.history import Run

STYLES: tuple[LineStyleType, ...] = ("-", "--", ":", "-.")  # a style for each run, a colour for each tier


def save_plots(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write the three plots of each headline metric as PNG files and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for metric in dict.fromkeys(run.config.objective.headline for run in runs):
        of_metric = [run for run in runs if run.config.objective.headline == metric]
        paths = [folder / f"{metric.stem}-by-{what}.png" for what in ("round", "bytes", "macs")]
        axes = (
            ("round", None),
            ("sent to and from one client of the tier so far, if it trains every round (MB)", _megabytes),
            ("computed by one client of the tier so far, if it trains every round (GMACs)", _gigamacs),
        )
        for path, (axis, cost) in zip(paths, axes, strict=True):
            _draw(of_metric, metric, axis, cost, path)
        written += paths
        if timed := [run for run in of_metric if run.seconds_so_far()]:
            written.append(folder / f"{metric.stem}-by-time.png")
            _draw(timed, metric, "simulated time of training (s)", None, written[-1], Run.seconds_so_far)
    return written


def tier_colours(runs: Sequence[Run]) -> dict[str, ColorType]:
    """Return colours, largest tier first; a tier has the same colour in every plot of the same tiers."""
    sizes = {tier: cost.parameters for run in runs for tier, cost in run.costs.items()}
    tiers = sorted(sizes, key=lambda tier: -sizes[tier])
    return dict(zip(tiers, cycle(matplotlib.color_sequences["tab10"]), strict=False))


def plain(name: str) -> str:
    """Return a name as a plot shows it letter by letter: dollars begin a formula."""
    return name.replace("$", r"\$")


def _megabytes(run: Run, tier: str) -> float | None:
    return None if (sent := run.bytes_per_client(tier)) is None else sent / 1e6


def _gigamacs(run: Run, tier: str) -> float | None:
    return None if (computed := run.macs_per_client(tier)) is None else computed / 1e9


def _draw(
    runs: Sequence[Run],
    metric: Metric,
    axis: str,
    cost: Callable[[Run, str], float | None] | None,
    path: Path,
    so_far: Callable[[Run], list[float]] | None = None,
) -> None:
    """Draw every tier's metric by round, by what its rounds have cost one client so far, or by what all took so far."""
    colours = tier_colours(runs)
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(runs):
        for tier in run.tiers:
            of_round = cost(run, tier) if cost else 1.0
            if not of_round:
                continue  # no client of this tier has trained yet
            axes.plot(
                _positions(run, of_round, so_far),
                [metric.scaled(record.metrics[tier][metric.name]) for record in run.evaluated],
                linestyle=STYLES[number % len(STYLES)],
                color=colours[tier],
                marker="o" if len(run.evaluated) < 3 else None,
                linewidth=1.6,
                alpha=0.85,
                label=f"{tier}, {run.costs[tier].parameters / 1e6:.2f} M"
                + (f" ({plain(run.name)})" if len(runs) > 1 else ""),
            )
    if cost:
        axes.set_xscale("log")  # tiers differ by an order of magnitude
        axes.xaxis.set_major_formatter("{x:g}")
        low, high = axes.get_xlim()
        tens = math.floor(math.log10(high)) >= math.ceil(math.log10(low))  # a short run may lie between two of them
        axes.xaxis.set_minor_formatter(NullFormatter() if tens else "{x:g}")
    elif not so_far:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(axis)
    axes.set_ylabel(metric.axis(" or ".join(dict.fromkeys(run.config.evaluated_on for run in runs))))
    axes.grid(alpha=0.3)
    axes.legend(title="tier, parameters", fontsize=8)
    figure.savefig(path)


def _positions(run: Run, of_round: float, so_far: Callable[[Run], list[float]] | None) -> list[float]:
    if so_far:
        return [so_far(run)[record.round - 1] for record in run.evaluated]
    return [record.round * of_round for record in run.evaluated]
