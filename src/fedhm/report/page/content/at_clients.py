"""How every tier's model does at each client, where clients evaluate."""

from collections.abc import Mapping, Sequence

from fedhm.config.sections.objective import Metric
from fedhm.report.page.content.curves import hex_colours
from fedhm.report.page.plot import MOST_ROWS, Line, Plot
from fedhm.report.sheets import Sheet
from fedhm.runs.history import Run
from fedhm.server.evaluation.client_metrics import ClientMetrics

ROOM = 0.8  # of the distance between two models, in which all clients stand side by side


def at_each_client(run: Run, runs: Sequence[Run]) -> Plot | None:
    """Return a point for each model and client, after the last evaluation; None where no client evaluates."""
    last = next((record for record in reversed(run.evaluated) if record.clients), None)
    if last is None:
        return None
    metric, colours = run.config.objective.headline, hex_colours(runs)
    whose = list(dict.fromkeys(one.tier for found in last.clients.values() for one in found.each))
    lines: list[Line] = []
    for tier in whose:
        x: list[float] = []
        y: list[float] = []
        hints: list[str] = []
        for place, found in enumerate(last.clients.values()):
            everybody = sorted(found.each, key=lambda one: (whose.index(one.tier), one.client))
            for number, one in enumerate(everybody):
                if one.tier == tier:
                    x.append(place + ROOM * ((number + 0.5) / len(everybody) - 0.5))
                    y.append(metric.scaled(one.metrics[metric.name]))
                    hints.append(f"client {one.client}, {one.samples:,} samples")
        colour = colours.get(tier, "#888888")
        lines.append(Line(f"clients of {tier}", x, y, colour, kind="points", run=run.name, tier=tier, hints=hints))
    spread = "; ".join(
        f"{tier} median {metric.shown(found.overall.median[metric.name])}, "
        f"worst tenth {metric.shown(found.overall.worst_tenth[metric.name])}"
        for tier, found in last.clients.items()
    )
    return Plot(
        title=f"{metric.name} at each client of {run.name}",
        x_label="model of tier",
        y_label=f"{metric.axis('').strip()} at each client, round {last.round}",
        lines=lines,
        summary=f"A point for each model and client, in the colour of the client's tier. {spread}.",
        categories=list(last.clients),
        decimals=metric.decimals,
        numbers=_sheet(last.clients, metric),
    )


def _sheet(clients: Mapping[str, ClientMetrics], metric: Metric) -> Sheet:
    """Return a row for each client, a column for each model."""
    everybody = {one.client: one for found in clients.values() for one in found.each}
    values = [{one.client: metric.shown(one.metrics[metric.name]) for one in of.each} for of in clients.values()]
    rows = [
        [f"{client}", one.tier, f"{one.samples:,}", *(of_model.get(client, "") for of_model in values)]
        for client, one in sorted(everybody.items())[:MOST_ROWS]
    ]
    note = f"The first {len(rows)} of {len(everybody):,} clients." if len(rows) < len(everybody) else ""
    columns = ["client", "its tier", "samples", *(f"model {tier}" for tier in clients)]
    return Sheet(columns, [rows], left=2, note=note, numbers=("client",))
