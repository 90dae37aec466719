"""The page of a comparison: the paper's table and figures, to be looked at in a browser."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from matplotlib.colors import to_hex

from fedhm.compare.figures import COLOURS, STYLES, TIER_COLOURS
from fedhm.compare.results import TargetCost, computed, sent, so_far
from fedhm.compare.tables import Comparison, TableCell, format_parameters
from fedhm.measure.cost import LayerCost
from fedhm.report.plot import Line, Plot, ends
from fedhm.runs.history import Run


def convergence(comparison: Comparison) -> Plot:
    """Return the metric of each method's smallest tier by round."""
    lines = [
        _line(number, name, place := places[max(places)], [n for n, _ in place.entry.curve(place.tier)])
        for number, (name, places) in enumerate(comparison.columns.items())
    ]
    title = f"{comparison.metric.name} of each method's smallest model by round"
    return _plot(comparison, title, "round", lines)


def by_cost(comparison: Comparison) -> list[Plot]:
    """Return the metric of each method's largest and smallest tier by what all clients have sent, and computed.

    Where all runs have it, by simulated time, too.
    """
    axes: list[tuple[str, Callable[[Run], Sequence[float]], float, str]] = [
        (
            "communication",
            partial(so_far, what=sent),
            1e6,
            "MB sent by server and clients together so far",
        ),
        ("computation", partial(so_far, what=computed), 1e9, "GMACs of all clients together for training so far"),
    ]
    places = [place for column in comparison.columns.values() for place in column.values()]
    if all(run.seconds_so_far() for place in places for run in place.entry.runs):
        axes.append(("simulated time", Run.seconds_so_far, 1, "simulated seconds of training so far"))
    plots: list[Plot] = []
    for by, what, unit, axis in axes:
        for choose, which in ((min, "largest"), (max, "smallest")):
            lines = []
            for number, (name, column) in enumerate(comparison.columns.items()):
                place = column[choose(column)]
                lines.append(_line(number, name, place, [spent / unit for spent in place.spent_so_far(what)]))
            title = f"{comparison.metric.name} of each method's {which} model by {by}"
            plots.append(_plot(comparison, title, axis, lines))
    return plots


def costs_to_target(comparison: Comparison, target: float, reached: Sequence[TargetCost]) -> Plot:
    """Return what it took to reach the target, relative to the full model on every client."""
    names = [f"{r.entry.label}, {format_parameters(r.entry.first.costs[r.tier].parameters)}" for r in reached]
    lines = []
    for number, what in enumerate(("communication", "computation")):
        known = [(float(n), ratio) for n, r in enumerate(reached) if (ratio := getattr(r, what)) is not None]
        places, ratios = zip(*known, strict=True) if known else ((), ())
        lines.append(Line(what, places, ratios, to_hex(TIER_COLOURS[number]), kind="bars"))
    never = [name for name, r in zip(names, reached, strict=True) if r.communication is None]
    return Plot(
        title=f"cost to first reach {comparison.metric.goal(target)}",
        x_label="entry, parameters",
        y_label="relative to the full model on every client",
        lines=lines,
        summary="Communication and computation of all clients until the target is first reached, relative to the full "
        f"model on every client.{f' Not reached by: {chr(44).join(never)}.' if never else ''}",
        categories=names,
        decimals=3,
    )


def by_layer(tiers: Mapping[str, Mapping[str, LayerCost]]) -> list[Plot]:
    """Return the parameters and MACs of the model's layers, a bar for each tier."""
    first = next(iter(tiers.values()))
    layers = [name for name in first if any(costs[name].macs for costs in tiers.values())]
    plots: list[Plot] = []
    for title, what in (("parameters by layer", "parameters"), ("MACs per sample by layer", "macs")):
        lines = [
            Line(
                tier,
                [float(place) for place in range(len(layers))],
                [getattr(costs[layer], what) for layer in layers],
                to_hex(TIER_COLOURS[number % len(TIER_COLOURS)]),
                kind="bars",
            )
            for number, (tier, costs) in enumerate(tiers.items())
        ]
        total = "; ".join(f"{line.label} {sum(line.y):,.0f}" for line in lines)
        summary = f"A bar for each tier of FedHM. All layers together: {total}."
        plots.append(Plot(title, "layer", title, lines, summary, categories=layers, decimals=0))
    return plots


def _line(number: int, name: str, place: TableCell, positions: Sequence[float]) -> Line:
    """Return a mean line with a band of ± one deviation."""
    spreads = [spread for _, spread in place.entry.curve(place.tier)]
    return Line(
        f"{name}, {format_parameters(place.parameters)}",
        positions,
        [spread.mean for spread in spreads],
        to_hex(COLOURS[number % len(COLOURS)]),
        number // 10 % len(STYLES),
        run=name,
        around=[spread.deviation or 0.0 for spread in spreads],
    )


def _plot(comparison: Comparison, title: str, axis: str, lines: Sequence[Line]) -> Plot:
    rounds, metric = axis == "round", comparison.metric
    return Plot(
        title=title,
        x_label=axis,
        y_label=metric.axis(comparison.evaluated_on),
        lines=lines,
        summary=f"A line for each method, with a band of one deviation over the seeds. They end at: "
        f"{ends(lines, metric.decimals)}.",
        log_x=not rounds,
        whole_x=rounds,
        together=rounds,
        decimals=metric.decimals,
    )
