"""The plots of a comparison: convergence, the metric by cost, costs to reach a target, and costs by layer.

The page and the PNG files show the same plots. Colours are methods, in the order of the table's columns, except by
layer, where they are tiers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fedhm.compare.results import TargetCost, bytes_sent, cumulative, macs_computed
from fedhm.compare.tables import Comparison, TableCell
from fedhm.config.objective import Metric
from fedhm.measure.cost import LayerCost
from fedhm.report.format import format_parameters
from fedhm.report.palette import MEASURES, category_look, tier_palette
from fedhm.report.plot import Line, Plot, last_values
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
            "sent and received by all clients",
            "B",
        ),
        "computation": _pair(
            comparison,
            "computation",
            partial(cumulative, cost=macs_computed),
            "MACs of all clients",
            "",
        ),
    }
    cells = [cell for column in comparison.columns.values() for cell in column.values()]
    if all(run.seconds_so_far() for cell in cells for run in cell.entry.runs):
        label = "simulated time of training"
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
    """Return the mean over the seeds with a band of ± one deviation, in the look of the n-th method."""
    spreads = [spread for _, spread in cell.curve]
    colour, dash = category_look(number)
    return Line(
        f"{name}, {format_parameters(cell.parameters)}",
        positions,
        [spread.mean for spread in spreads],
        colour,
        dash,
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
        summary=f"A line for each method{_band_sentence(lines)}.{_whose_cost(unit)} "
        f"They end at: {last_values(lines, metric.decimals)}.",
        log_x=not rounds,
        whole_x=rounds,
        x_unit=unit,
        shared_pointer=rounds,
        decimals=metric.decimals,
        legend_title="method, parameters",
    )


def _band_sentence(lines: Sequence[Line]) -> str:
    return ", with a band of one deviation over the seeds" if any(any(line.band) for line in lines) else ""


def _whose_cost(unit: str | None) -> str:
    """Return the sentence that keeps readers from taking the cost for that of one model."""
    return "" if unit in (None, "s") else " The cost is that of all clients together, with models of all sizes, so far."


def target_plot(comparison: Comparison, target: float, costs: Sequence[TargetCost]) -> Plot:
    """Return the costs of all clients until a tier reaches the target, relative to the full model on every client."""
    names = [f"{cost.entry.label}\nuntil {cost.tier} reaches it" for cost in costs]
    ratios = {
        "communication": [cost.communication for cost in costs],
        "computation": [cost.computation for cost in costs],
    }
    goal = comparison.metric.goal(target)
    never = ", ".join(f"{cost.entry.label} ({cost.tier})" for cost in costs if cost.communication is None)
    return Plot(
        title=f"cost of all clients until a tier first reaches {goal}",
        x_label="method, and the tier that reaches it",
        y_label="cost of all clients, relative to the full model on every client",
        lines=measure_bars({kind: [math.nan if r is None else r for r in found] for kind, found in ratios.items()}),
        summary=f"What all clients of a method send and compute together, with models of all sizes, until the model of "
        f"the named tier first reaches {goal}. 1 is the cost of training the full model on every client until it does. "
        f"It is not the cost of the named tier alone.{f' Not reached by: {never}.' if never else ''}",
        categories=names,
        horizontal=True,
        reference=1.0,
        missing="not reached",
        decimals=3,
    )


def measure_bars(values: Mapping[str, Sequence[float]]) -> list[Line]:
    """Return bars of two measures, such as communication and computation: grey, and the second is hatched."""
    return [
        Line(name, [float(place) for place in range(len(found))], found, colour, kind="bars", hatched=number > 0)
        for number, ((name, found), colour) in enumerate(zip(values.items(), MEASURES, strict=False))
    ]


def layer_plots(tiers: Mapping[str, Mapping[str, LayerCost]], colours: Mapping[str, str] | None = None) -> list[Plot]:
    """Return the parameters and the MACs of the model's layers, a bar for each tier.

    colours  those that the tiers have in other plots of the page; otherwise they are made for these tiers
    """
    if colours is None or not set(tiers) <= set(colours):
        colours = dict(zip(tiers, tier_palette(len(tiers)), strict=True))
    return _bars_by_layer(tiers, colours, "tier")


def network_plots(networks: Mapping[str, Mapping[str, LayerCost]], each: str) -> list[Plot]:
    """Return the parameters and the MACs of several networks that have the same layers, a bar for each network."""
    return _bars_by_layer(networks, {name: category_look(n)[0] for n, name in enumerate(networks)}, each)


def _bars_by_layer(tiers: Mapping[str, Mapping[str, LayerCost]], colours: Mapping[str, str], each: str) -> list[Plot]:
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
                colours[tier],
                kind="bars",
                tier=tier,
            )
            for tier, costs in tiers.items()
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
