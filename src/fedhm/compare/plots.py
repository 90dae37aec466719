"""The plots of a comparison: convergence, the metric by cost, costs to reach a target, and costs by layer.

They are those of the paper. The page and the PNG files show the same plots.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fedhm.compare.results import TargetCost, bytes_sent, cumulative, macs_computed
from fedhm.compare.tables import Comparison, TableCell
from fedhm.config.objective import Metric
from fedhm.measure.cost import LayerCost
from fedhm.report.format import format_parameters
from fedhm.report.plot import COLOURS, DARK_COLOURS, Line, Plot, last_values
from fedhm.runs.history import Run


def convergence_plot(comparison: Comparison) -> Plot:
    """Return the metric of each method's smallest model by round."""
    lines: list[Line] = []
    for number, (name, column) in enumerate(comparison.columns.items()):
        cell = column[max(column)]
        lines.append(method_line(number, name, cell, [round_number for round_number, _ in cell.curve]))
    title = f"{comparison.metric.name} of each method's smallest model by round"
    return method_plot(title, "round", lines, comparison.metric, comparison.evaluated_on)


def cost_plots(comparison: Comparison) -> dict[str, list[Plot]]:
    """Return the metric by communication, by computation and, if all runs know it, by simulated time.

    Costs are those of all clients together. Each kind has two plots: of each method's largest and smallest model.
    """
    plots = {
        "communication": _pair(
            comparison,
            "communication",
            partial(cumulative, cost=bytes_sent),
            "sent by server and clients for training so far, all together",
            "B",
        ),
        "computation": _pair(
            comparison,
            "computation",
            partial(cumulative, cost=macs_computed),
            "MACs of all clients together for training so far",
            "",
        ),
    }
    cells = [cell for column in comparison.columns.values() for cell in column.values()]
    if all(run.seconds_so_far() for cell in cells for run in cell.entry.runs):
        label = "simulated time of training so far"
        plots["time"] = _pair(comparison, "simulated time", Run.seconds_so_far, label, "s")
    return plots


def _pair(
    comparison: Comparison, by: str, spent: Callable[[Run], Sequence[float]], label: str, unit: str
) -> list[Plot]:
    plots: list[Plot] = []
    for choose, size in ((min, "largest"), (max, "smallest")):  # rows begin with the strongest level
        lines: list[Line] = []
        for number, (name, column) in enumerate(comparison.columns.items()):
            cell = column[choose(column)]
            lines.append(method_line(number, name, cell, cell.spent_so_far(spent)))
        title = f"{comparison.metric.name} of each method's {size} model by {by}"
        plots.append(method_plot(title, label, lines, comparison.metric, comparison.evaluated_on, unit))
    return plots


def method_line(number: int, name: str, cell: TableCell, positions: Sequence[float]) -> Line:
    """Return the mean over the seeds with a band of ± one deviation."""
    spreads = [spread for _, spread in cell.curve]
    return Line(
        f"{name}, {format_parameters(cell.parameters)}",
        positions,
        [spread.mean for spread in spreads],
        COLOURS[number % len(COLOURS)],
        number // len(DARK_COLOURS) % 2,  # a light line is also a dashed one
        run=name,
        band=[spread.deviation or 0.0 for spread in spreads],
    )


def method_plot(
    title: str, x_label: str, lines: Sequence[Line], metric: Metric, evaluated_on: str, unit: str | None = None
) -> Plot:
    """Return the metric of several methods by round, or by a cost in this unit."""
    rounds = unit is None
    return Plot(
        title=title,
        x_label=x_label,
        y_label=metric.axis(evaluated_on),
        lines=lines,
        summary=f"A line for each method, with a band of one deviation over the seeds. They end at: "
        f"{last_values(lines, metric.decimals)}.",
        log_x=not rounds,
        whole_x=rounds,
        x_unit=unit,
        shared_pointer=rounds,
        decimals=metric.decimals,
        legend_title="method, parameters",
    )


def target_plot(comparison: Comparison, target: float, costs: Sequence[TargetCost]) -> Plot:
    """Return the costs until the target is reached, relative to the full model on every client."""
    names = [f"{cost.entry.label}, {format_parameters(cost.entry.first.costs[cost.tier].parameters)}" for cost in costs]
    ratios = {
        "communication": [cost.communication for cost in costs],
        "computation": [cost.computation for cost in costs],
    }
    lines = [
        Line(
            kind,
            [float(place) for place in range(len(names))],
            [math.nan if ratio is None else ratio for ratio in values],
            colour,
            kind="bars",
        )
        for (kind, values), colour in zip(ratios.items(), DARK_COLOURS, strict=False)
    ]
    never = ", ".join(name for name, cost in zip(names, costs, strict=True) if cost.communication is None)
    return Plot(
        title=f"cost to first reach {comparison.metric.goal(target)}",
        x_label="entry, parameters",
        y_label="relative to the full model on every client",
        lines=lines,
        summary="Communication and computation of all clients until the target is first reached, relative to the full "
        f"model on every client.{f' Not reached by: {never}.' if never else ''}",
        categories=names,
        horizontal=True,
        reference=1.0,
        missing="not reached",
        decimals=3,
    )


def layer_plots(tiers: Mapping[str, Mapping[str, LayerCost]], each: str = "tier") -> list[Plot]:
    """Return the parameters and the MACs of the model's layers, a bar for each tier, or for each of something else."""
    first = next(iter(tiers.values()))
    layers = [name for name in first if any(costs[name].macs for costs in tiers.values())]  # norms would be invisible
    amounts: dict[str, Callable[[LayerCost], int]] = {
        "parameters": lambda cost: cost.parameters,
        "MACs per sample": lambda cost: cost.macs,
    }
    plots: list[Plot] = []
    for name, amount in amounts.items():
        lines = [
            Line(
                tier,
                [float(place) for place in range(len(layers))],
                [amount(costs[layer]) for layer in layers],
                DARK_COLOURS[number % len(DARK_COLOURS)],
                kind="bars",
            )
            for number, (tier, costs) in enumerate(tiers.items())
        ]
        total = "; ".join(f"{line.label} {sum(line.y):,.0f}" for line in lines)
        plot = Plot(
            title=f"{name} by layer",
            x_label="layer",
            y_label=name,
            lines=lines,
            summary=f"A bar for each {each}. All layers together: {total}.",
            y_unit="",
            categories=layers,
            decimals=0,
            legend_title=each,
        )
        plots.append(plot)
    return plots
