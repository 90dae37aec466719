"""Accuracy by round, and by bytes sent, of one or several runs."""

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter
from matplotlib.typing import ColorType, LineStyleType

from fedhm.runs.history import Run

STYLES: tuple[LineStyleType, ...] = ("-", "--", ":", "-.")  # a style for each run, a colour for each tier


def save_plots(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Writes the two plots as PNG files and gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    by_round, by_bytes = folder / "accuracy-by-round.png", folder / "accuracy-by-bytes.png"
    _draw(runs, "round", lambda _, __, rounds: rounds, by_round)
    _draw(runs, "sent to and from one client of the tier so far, if it trains every round (MB)", _megabytes, by_bytes)
    return [by_round, by_bytes]


def tier_colours(runs: Sequence[Run]) -> dict[str, ColorType]:
    """Largest tier first; a tier has the same colour in every plot of the same tiers."""
    sizes = {tier: cost.parameters for run in runs for tier, cost in run.costs.items()}
    tiers = sorted(sizes, key=lambda tier: -sizes[tier])
    return dict(zip(tiers, cycle(matplotlib.color_sequences["tab10"]), strict=False))


def _megabytes(run: Run, tier: str, rounds: int) -> float:
    return rounds * (run.bytes_per_client(tier) or math.nan) / 1e6


def _draw(runs: Sequence[Run], axis: str, position: Callable[[Run, str, int], float], path: Path) -> None:
    colours = tier_colours(runs)
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(runs):
        for tier in run.tiers:
            where = [position(run, tier, record.round) for record in run.evaluated]
            if math.isnan(where[0]):
                continue  # no client of this tier has trained yet
            axes.plot(
                where,
                [100 * record.scores[tier].accuracy for record in run.evaluated],
                linestyle=STYLES[number % len(STYLES)],
                color=colours[tier],
                marker="o" if len(run.evaluated) < 3 else None,
                linewidth=1.6,
                alpha=0.85,
                label=f"{tier}, {run.costs[tier].parameters / 1e6:.2f} M" + (f" ({run.name})" if len(runs) > 1 else ""),
            )
    if position is _megabytes:
        axes.set_xscale("log")  # tiers differ by an order of magnitude
        axes.xaxis.set_major_formatter("{x:g}")
        low, high = axes.get_xlim()
        tens = math.floor(math.log10(high)) >= math.ceil(math.log10(low))  # a short run may lie between two of them
        axes.xaxis.set_minor_formatter(NullFormatter() if tens else "{x:g}")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(axis)
    axes.set_ylabel("test accuracy (%)")
    axes.grid(alpha=0.3)
    axes.legend(title="tier, parameters", fontsize=8)
    figure.savefig(path)
