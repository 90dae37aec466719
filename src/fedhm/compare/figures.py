"""The paper's figures of a comparison: convergence, the metric by what was spent, and costs to reach a target."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from fedhm.compare.results import TargetCost, computed, sent, so_far
from fedhm.compare.tables import Comparison, TableCell, format_parameters
from fedhm.measure.cost import LayerCost
from fedhm.report.figures.plots import plain
from fedhm.runs.history import Run
from fedhm.server.record import Traffic

# the ten dark ones first, then their light twins
COLOURS = [*matplotlib.color_sequences["tab20"][::2], *matplotlib.color_sequences["tab20"][1::2]]
STYLES = ("-", "--")  # a light line is also a dashed one
MANY = 8  # more methods than that have their legend outside


def save_convergence(comparison: Comparison, path: Path) -> Path:
    """Draw the metric of each method's smallest tier by round."""
    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, (name, places) in enumerate(comparison.columns.items()):
        place = places[max(places)]
        rounds = [round_number for round_number, _ in place.entry.curve(place.tier)]
        _draw(axes, number, name, place, rounds)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes, "round", "each method's smallest model")
    axes.set_ylabel(comparison.metric.axis(comparison.evaluated_on))
    _legend(figure, [axes])
    figure.savefig(path)
    return path


def save_communication(comparison: Comparison, path: Path) -> Path:
    """Draw the metric of each method's largest and smallest tier by what all clients together have sent."""
    axis = "sent by server and clients for training so far, all together"
    return _save_by_cost(comparison, sent, axis, EngFormatter(unit="B"), path)


def save_computation(comparison: Comparison, path: Path) -> Path:
    """Draw the same by what all clients together have computed."""
    axis = "MACs of all clients together for training so far"
    return _save_by_cost(comparison, computed, axis, EngFormatter(), path)


def save_time(comparison: Comparison, path: Path) -> Path:
    """Draw the same by the simulated time of training on the clients' devices."""
    axis = "simulated time of training so far"
    return _save_by(comparison, Run.seconds_so_far, axis, EngFormatter(unit="s"), path)


def _save_by_cost(
    comparison: Comparison, what: Callable[[Traffic], int], axis: str, unit: EngFormatter, path: Path
) -> Path:
    return _save_by(comparison, lambda run: so_far(run, what), axis, unit, path)


def _save_by(
    comparison: Comparison, spent: Callable[[Run], Sequence[float]], axis: str, unit: EngFormatter, path: Path
) -> Path:
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, choose, title in zip(panels, (min, max), ("largest", "smallest"), strict=True):
        for number, (name, places) in enumerate(comparison.columns.items()):
            place = places[choose(places)]
            _draw(axes, number, name, place, place.spent_so_far(spent))
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(unit)
        axes.xaxis.set_minor_formatter(NullFormatter())
        _finish(axes, axis, f"{title} model of each method")
    _legend(figure, panels)
    figure.axes[0].set_ylabel(comparison.metric.axis(comparison.evaluated_on))
    figure.savefig(path)
    return path


def save_costs_to_target(comparison: Comparison, target: float, reached: Sequence[TargetCost], path: Path) -> Path:
    figure = Figure(figsize=(11, 1.4 + 0.3 * len(reached)), dpi=150, layout="constrained")
    figure.suptitle(f"Cost to first reach {comparison.metric.goal(target)}, relative to the full model on every client")
    left, right = figure.subplots(1, 2, sharey=True)
    columns = list(comparison.columns)
    colours = [COLOURS[columns.index(comparison.column(r.entry)) % len(COLOURS)] for r in reached]
    labels = [f"{r.entry.label}, {format_parameters(r.entry.first.costs[r.tier].parameters)}" for r in reached]
    _bars(left, [r.communication for r in reached], labels, colours)
    _bars(right, [r.computation for r in reached], labels, colours)
    left.set_title("communication", fontsize=10)
    right.set_title("computation", fontsize=10)
    figure.savefig(path)
    return path


def _draw(axes: Axes, number: int, name: str, place: TableCell, positions: Sequence[float]) -> None:
    """Draw a mean line with a band of ± one deviation."""
    spreads = [spread for _, spread in place.entry.curve(place.tier)]
    means = np.array([spread.mean for spread in spreads])
    around = np.array([spread.deviation or 0.0 for spread in spreads])
    colour, style = COLOURS[number % len(COLOURS)], STYLES[number // 10 % len(STYLES)]
    marker = "o" if len(means) < 3 else None
    label = f"{plain(name)}, {format_parameters(place.parameters)}"
    axes.plot(positions, means, style, color=colour, marker=marker, linewidth=1.5, label=label)
    if around.any():
        axes.fill_between(positions, means - around, means + around, color=colour, alpha=0.12, linewidth=0)


def _bars(axes: Axes, ratios: Sequence[float | None], labels: Sequence[str], colours: Sequence[Any]) -> None:
    widths = [ratio or 0.0 for ratio in ratios]
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
    bars = axes.barh(range(len(ratios)), widths, color=colours, height=0.7)
    axes.bar_label(bars, [" not reached" if ratio is None else f" {ratio:.2f}" for ratio in ratios], fontsize=8)
    axes.set_yticks(range(len(ratios)), [plain(label) for label in labels], fontsize=8)
    axes.set_ylim(len(ratios) - 0.4, -0.6)  # the first on top
    if max(widths) > 5:  # one far out would leave slivers of the others
        axes.set_xscale("log")
        axes.set_xlim(0.7 * min([1.0, *(w for w in widths if w)]), 2 * max(widths))
    else:
        axes.set_xlim(0, 1.18 * max([1.0, *widths]))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Put a legend in each panel, or one for all beside them, named by the first, where it would cover the lines."""
    handles, labels = panels[0].get_legend_handles_labels()
    if len(labels) > MANY:
        names = labels if len(panels) == 1 else [label.rpartition(", ")[0] for label in labels]
        figure.legend(handles, names, loc="outside right center", fontsize=8, handlelength=3)
    else:
        for axes in panels:
            axes.legend(title="method, parameters", fontsize=8, title_fontsize=8)


def _finish(axes: Axes, x_label: str, title: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


TIER_COLOURS = matplotlib.color_sequences["tab10"]


def save_layers(tiers: Mapping[str, Mapping[str, LayerCost]], path: Path) -> Path:
    """Draw the costs by layer of each tier, all with the same layers."""
    first = next(iter(tiers.values()))
    layers = [name for name in first if any(costs[name].macs for costs in tiers.values())]  # norms would be invisible
    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    height = 0.8 / len(tiers)
    for axes, title, what in ((left, "parameters", "parameters"), (right, "MACs per sample", "macs")):
        for number, (tier, costs) in enumerate(tiers.items()):
            places = np.arange(len(layers)) + (number - (len(tiers) - 1) / 2) * height
            values = [getattr(costs[layer], what) for layer in layers]
            axes.bar(places, values, height, color=TIER_COLOURS[number % len(TIER_COLOURS)], label=tier)
        axes.set_xticks(np.arange(len(layers)), layers, fontsize=8, rotation=30 if len(layers) > 6 else 0)
        axes.yaxis.set_major_formatter(EngFormatter())
        axes.set_axisbelow(True)
        axes.set_title(title, fontsize=10)
        axes.grid(axis="y", alpha=0.3)
    left.legend(title="tier", fontsize=8)
    figure.savefig(path)
    return path
