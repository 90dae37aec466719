"""Every metric of every tier by round, by bytes, by computation and, where it is known, by simulated time."""

from collections.abc import Callable, Sequence

from matplotlib.colors import to_hex

from fedhm.config.sections.objective import Metric
from fedhm.report.figures.plots import tier_colours
from fedhm.report.page.plot import Line, Plot, ends
from fedhm.runs.history import Run

Places = Callable[[Run, str], list[float] | None]  # where a tier's evaluated rounds stand on the axis


def hex_colours(runs: Sequence[Run]) -> dict[str, str]:
    """Return the colours of tiers, the same as in the plots beside the page."""
    return {tier: to_hex(colour) for tier, colour in tier_colours(runs).items()}


def metrics_of(runs: Sequence[Run]) -> list[Metric]:
    """Return the metrics of all runs, headlines first."""
    headlines = [run.config.objective.headline for run in runs]
    return list(dict.fromkeys([*headlines, *(metric for run in runs for metric in run.config.objective.metrics)]))


def curves(runs: Sequence[Run], metric: Metric) -> list[Plot]:
    """Return the plots of one metric."""
    axes: list[tuple[str, str, Places]] = [
        ("round", "round", _rounds),
        ("bytes", "MB sent to and from one client of the tier, if it trains every round", _megabytes),
        ("computation", "GMACs computed by one client of the tier, if it trains every round", _gigamacs),
        ("simulated time", "simulated seconds", _seconds),
    ]
    plots = (_plot(runs, metric, *axis) for axis in axes)
    return [plot for plot in plots if plot.lines]


def _plot(runs: Sequence[Run], metric: Metric, by: str, axis: str, places: Places) -> Plot:
    colours = hex_colours(runs)
    lines: list[Line] = []
    for number, run in enumerate(runs):
        for tier in run.tiers:
            evaluated = [record for record in run.evaluated if metric.name in record.metrics[tier]]
            found = places(run, tier)
            if not evaluated or found is None:
                continue
            label = f"{run.name}, {tier}" if len(runs) > 1 else tier
            x = [found[record.round - 1] for record in evaluated]
            y = [metric.scaled(record.metrics[tier][metric.name]) for record in evaluated]
            lines.append(Line(label, x, y, colours[tier], number, run=run.name, tier=tier))
    on = " or ".join(dict.fromkeys(run.config.evaluated_on for run in runs))
    rounds = by == "round"
    return Plot(
        title=f"{metric.name} by {by}",
        x_label=axis,
        y_label=metric.axis(on),
        lines=lines,
        summary=f"{metric.axis(on)} by {by}, a line for each tier{' and run' if len(runs) > 1 else ''}. "
        f"They end at: {ends(lines, metric.decimals)}.",
        log_x=by in ("bytes", "computation"),  # tiers differ by an order of magnitude
        whole_x=rounds,
        together=rounds,
        decimals=metric.decimals,
    )


def _rounds(run: Run, _: str) -> list[float]:
    return [float(record.round) for record in run.records]


def _megabytes(run: Run, tier: str) -> list[float] | None:
    sent = run.bytes_per_client(tier)
    return [record.round * sent / 1e6 for record in run.records] if sent else None


def _gigamacs(run: Run, tier: str) -> list[float] | None:
    computed = run.macs_per_client(tier)
    return [record.round * computed / 1e9 for record in run.records] if computed else None


def _seconds(run: Run, _: str) -> list[float] | None:
    return run.seconds_so_far() or None
