"""The headline metric of every tier's model at every client, one point each."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.typing import ColorType

from fedhm.config.objective import Metric
from fedhm.report.figures.plots import plain, tier_colours
from fedhm.runs.history import Run
from fedhm.server.record import ClientMetrics, Group

ROOM = 0.8  # of the distance between two models, in which the clients of all tiers stand side by side


def save_client_plots(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write a plot for each headline metric that clients evaluated, with a row for each run, and return their paths."""
    last = {run.name: record.clients for run in runs for record in run.evaluated if record.clients}
    written: list[Path] = []
    for metric in dict.fromkeys(run.config.objective.headline for run in runs if run.name in last):
        drawn = [run for run in runs if run.name in last and run.config.objective.headline == metric]
        figure = Figure(figsize=(7, 0.6 + 3.6 * len(drawn)), dpi=150, layout="constrained")
        for run, axes in zip(drawn, figure.subplots(len(drawn), squeeze=False)[:, 0], strict=True):
            _draw(axes, run, metric, last[run.name])
            if len(drawn) > 1:
                axes.set_title(run.name, fontsize=9, loc="left")
        written.append(folder / f"{metric.stem}-at-clients.png")
        figure.savefig(written[-1])
    return written


def _draw(axes: Axes, run: Run, metric: Metric, found: dict[str, ClientMetrics]) -> None:
    devices = [device.name for device in run.config.federation.device_of]
    colours = _device_colours(devices) or tier_colours([run])
    whose = list(dict.fromkeys(name for clients in found.values() for name in _groups(clients)))
    step = ROOM / len(whose)
    for place, clients in enumerate(found.values()):
        for number, name in enumerate(whose):
            members = [one for one in clients.each if (devices[one.client] if devices else one.tier) == name]
            values = [metric.scaled(one.metrics[metric.name]) for one in members]
            if not values:
                continue
            colour = colours.get(name, "0.5")  # of a tier without a network
            middle = place + (number + 0.5) * step - ROOM / 2
            # side by side in the order of the clients' numbers, so that equal values do not hide each other
            aside = (np.arange(len(values)) + 0.5) / len(values) - 0.5
            axes.plot(
                middle + 0.7 * step * aside,
                values,
                linestyle="none",
                marker="o",
                markersize=3.5 if len(values) < 30 else 2,
                markeredgewidth=0,
                color=colour,
                alpha=0.8,
            )
            median = metric.scaled(_groups(clients)[name].median[metric.name])
            axes.hlines(median, middle - 0.45 * step, middle + 0.45 * step, color=colour, linewidth=1, zorder=1)
        pooled = metric.scaled(clients.overall.pooled[metric.name])
        axes.hlines(pooled, place - ROOM / 2, place + ROOM / 2, color="0.2", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(found)), list(found))
    axes.set_xlim(-0.5, len(found) - 0.5)
    axes.set_xlabel("model of tier")
    axes.set_ylabel(f"{metric.axis('')} at each client".strip())
    axes.grid(axis="y", alpha=0.3)
    dots = [
        Line2D([], [], color=colours.get(name, "0.5"), marker="o", markersize=4, linewidth=1, label=plain(name))
        for name in whose
    ]
    pooled_line = Line2D([], [], color="0.2", linewidth=1, linestyle="--", label="all samples of all clients")
    axes.legend(
        handles=[*dots, pooled_line],
        title=f"clients {'with device' if devices else 'of tier'}, and their median",
        alignment="left",
        title_fontsize=8,
        fontsize=8,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(whose) + 1,
        handlelength=1.6,
        columnspacing=1.4,
        frameon=False,
    )


def _groups(clients: ClientMetrics) -> dict[str, Group]:
    """Return the clients by their devices, or where nobody knows these by their tiers."""
    return clients.by_device or clients.by_tier


def _device_colours(devices: Sequence[str]) -> dict[str, ColorType]:
    return dict(zip(dict.fromkeys(devices), cycle(matplotlib.color_sequences["tab10"]), strict=False))
