"""The plots of runs: metrics by cost, clients, spectrum, theory, privacy, participation and layers.

Each function makes one kind of plot, for the page and for PNG files alike.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedhm.config.objective import Metric
from fedhm.measure.cost import ROOT
from fedhm.report.format import format_parameters
from fedhm.report.palette import CATEGORIES, INK, NEUTRAL, tier_palette
from fedhm.report.plot import DASHES, MAX_TABLE_ROWS, SYMBOLS, Line, Plot, last_values, save_png
from fedhm.report.sheets import Sheet
from fedhm.runs.history import Run
from fedhm.server.record import ClientMetrics, GroupMetrics, Record

GAP = math.nan  # between two parts of a line


def save_run_plots(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write the plots of runs as PNG files and return their paths."""
    written: list[Path] = []
    clients: list[Path] = []
    for metric in dict.fromkeys(run.config.objective.headline for run in runs):
        measured = [run for run in runs if run.config.objective.headline == metric]
        for name, plot in metric_plots(measured, metric).items():
            if plot.lines or name != "time":
                written.append(save_png([plot], folder / f"{metric.stem}-by-{name}.png"))
        if plots := _known(client_plot(run, measured) for run in measured):
            clients.append(save_png(plots, folder / f"{metric.stem}-at-clients.png"))
    written += clients
    if energy := energy_plot(runs):
        written.append(save_png([energy], folder / "energy-beyond-rank.png"))
    if epsilon := epsilon_plot(runs):
        written.append(save_png([epsilon], folder / "epsilon-by-round.png"))
    if theory := theory_plots(runs):
        written.append(save_png(theory, folder / "theory.png"))
    return written


def tier_colours(runs: Sequence[Run]) -> dict[str, str]:
    """Return a colour for each tier, largest first. Plots of the same tiers have the same colours."""
    sizes = {tier: cost.parameters for run in runs for tier, cost in run.costs.items()}
    tiers = sorted(sizes, key=lambda tier: -sizes[tier])
    return dict(zip(tiers, tier_palette(len(tiers)), strict=True))


def _known(plots: Iterable[Plot | None]) -> list[Plot]:
    return [plot for plot in plots if plot]


# Metrics by round and by cost.

Positions = Callable[[Run, str], list[float] | None]  # where a tier's rounds are on the axis; None: unknown


def metric_plots(runs: Sequence[Run], metric: Metric) -> dict[str, Plot]:
    """Return a metric of every tier by round, bytes, MACs and simulated time. Some may have no lines."""
    axes = {
        "round": _Axis("round", "round", _rounds),
        "bytes": _Axis("bytes", "sent and received by one client", _bytes, "B", _IF_IT_TRAINS),
        "macs": _Axis("computation", "MACs of one client", _macs, "", _IF_IT_TRAINS),
        "time": _Axis("simulated time", "simulated time of training", _seconds, "s"),
    }
    return {name: _metric_plot(runs, metric, axis) for name, axis in axes.items()}


@dataclass(frozen=True)
class _Axis:
    """The horizontal axis of a metric."""

    by: str
    label: str
    positions: Positions
    unit: str | None = None
    remark: str = ""  # a sentence of the summary


_IF_IT_TRAINS = " The cost is that of one client of the tier so far, if it trains in every round."


def _metric_plot(runs: Sequence[Run], metric: Metric, axis: _Axis) -> Plot:
    colours, several = tier_colours(runs), len(runs) > 1
    lines: list[Line] = []
    for number, run in enumerate(runs):
        for tier in run.tiers:
            evaluated = [record for record in run.evaluated if metric.name in record.metrics[tier]]
            places = axis.positions(run, tier)
            if not evaluated or places is None:
                continue
            line = Line(
                f"{run.name}, {tier}" if several else tier,
                [places[record.round - 1] for record in evaluated],
                [metric.scaled(record.metrics[tier][metric.name]) for record in evaluated],
                colours[tier],
                number,
                run=run.name,
                tier=tier,
                detail=format_parameters(run.costs[tier].parameters),
            )
            lines.append(line)
    y_label = metric.axis(" or ".join(dict.fromkeys(run.config.evaluated_on for run in runs)))
    return Plot(
        title=f"{metric.name} by {axis.by}",
        x_label=axis.label,
        y_label=y_label,
        lines=lines,
        summary=f"{y_label[0].upper()}{y_label[1:]} by {axis.by}, a line for each tier{' and run' if several else ''}."
        f"{axis.remark} They end at: {last_values(lines, metric.decimals)}.",
        log_x=axis.by in ("bytes", "computation"),  # tiers differ by an order of magnitude
        whole_x=axis.by == "round",
        x_unit=axis.unit,
        shared_pointer=axis.by == "round",
        decimals=metric.decimals,
        legend_title="run, tier, parameters" if several else "tier, parameters",
    )


def _rounds(run: Run, _: str) -> list[float]:
    return [float(record.round) for record in run.records]


def _bytes(run: Run, tier: str) -> list[float] | None:
    sent = run.bytes_per_client(tier)  # None or 0: no client of the tier has trained yet
    return [record.round * sent for record in run.records] if sent else None


def _macs(run: Run, tier: str) -> list[float] | None:
    computed = run.macs_per_client(tier)
    return [record.round * computed for record in run.records] if computed else None


def _seconds(run: Run, _: str) -> list[float] | None:
    return run.seconds_so_far() or None


# Other numbers of the records by round.

THEORY = "theory/"  # the names of diagnostics begin with it
ENERGY = "energy_beyond/"  # the name of a diagnostic, followed by the tier
RESOLUTION = 1e-7  # of float32: smaller shares are rounding errors, and 0 has no place on a logarithmic axis


def energy_plot(runs: Sequence[Run]) -> Plot | None:
    """Return the energy beyond each tier's rank by round; None if no run's method knows it.

    Where the lines fall, the model shrinks to its small tiers (rank collapse).
    """
    colours = tier_colours(runs)
    lines: list[Line] = []
    for number, run in enumerate(runs):
        for tier, energies in _energies_by_tier(run).items():
            label = f"{run.name}, {tier}" if len(runs) > 1 else tier
            percent = [100 * energy for energy in energies.values()]
            colour = colours.get(tier, NEUTRAL)
            lines.append(Line(label, list(energies), percent, colour, number, run=run.name, tier=tier))
    if not lines:
        return None
    return Plot(
        title="energy beyond each rank by round",
        x_label="round",
        y_label="squared norm beyond the tier's rank (%)",
        lines=lines,
        summary="The share of the model's squared norm that lies beyond each tier's rank, by round, on a logarithmic "
        f"axis: where lines fall, the model shrinks to its small tiers. They end at: {last_values(lines, 3)}.",
        log_y=True,
        whole_x=True,
        y_includes=(9, 100),  # at least one decade, so that two numbers stand beside the axis
        shared_pointer=True,
        run_labels={run.name: _with_remark(run) for run in runs},
    )


def _energies_by_tier(run: Run) -> dict[str, dict[int, float]]:
    energies: dict[str, dict[int, float]] = defaultdict(dict)
    for record in run.records:
        for name, energy in record.diagnostics.items():
            if name.startswith(ENERGY):
                energies[name.removeprefix(ENERGY)][record.round] = max(energy, RESOLUTION)
    return energies


def _with_remark(run: Run) -> str:
    remark = run.config.method.remark
    return f"{run.name} ({remark})" if remark else run.name


def epsilon_plot(runs: Sequence[Run]) -> Plot | None:
    """Return ε of differential privacy by round; None if no run is private."""
    lines: list[Line] = []
    for number, run in enumerate(runs):
        counted = [(record.round, record.epsilon) for record in run.records if record.epsilon is not None]
        if counted:
            label = f"{run.name}, noise {run.config.privacy.noise:g}, δ = {run.config.privacy.delta:g}"
            rounds, epsilons = zip(*counted, strict=True)
            colour = (INK, NEUTRAL)[number // len(DASHES) % 2]  # colours are for tiers, runs have dashes
            lines.append(Line(label, rounds, epsilons, colour, number, run=run.name))
    if not lines:
        return None
    return Plot(
        title="ε by round",
        x_label="round",
        y_label="ε of differential privacy, of every client",
        lines=lines,
        summary=f"The privacy that every client of a private run has, by round. ε ends at: {last_values(lines, 3)}.",
        whole_x=True,
        y_includes=(0,),
        shared_pointer=True,
    )


# The convergence bound, by the names of its diagnostics (`docs/theory.md`).

MEASURED = {
    "gradient_norm_squared": "‖∇g‖² at the mean of the factors",
    "drift": "drift of the clients",
    "drift_bound": "bound on the drift",
}
BOUND_TERMS = {
    "bound/start": "start: 2 f(w₀) / (T η)",
    "bound/sigma1_over_lf": "truncation of the mean (κ_σ1) (× L_f)",
    "bound/drift_over_luv2": "drift (κ_g) (× L_UV²)",
    "bound/averaging_over_lf": "averaging of products (κ_g κ_UV²) (× L_f)",
    "bound/noise_over_luv": "noise (M_g / P) (× L_UV)",
    "bound/sigma2_over_luv2": "unequal ranks (κ_σ2) (× L_UV²)",
    "bound/sigma2_over_lf": "unequal ranks (κ_σ2 κ_UV²) (× L_f)",
}


def theory_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return what the convergence bound is about, and its terms, by round; nothing if no run has measured them."""
    plots = [
        _theory_plot(
            runs,
            MEASURED,
            "gradient and drift by round",
            "squared norm",
            "The squared gradient norm that the convergence bound is about, the clients' drift and its bound",
        ),
        _theory_plot(
            runs,
            BOUND_TERMS,
            "terms of the convergence bound by round",
            "term, without its Lipschitz modulus",
            "The terms of the convergence bound with the constants of each round, without Lipschitz moduli",
        ),
    ]
    return [plot for plot in plots if plot.lines]


def _theory_plot(runs: Sequence[Run], names: Mapping[str, str], title: str, y_label: str, what: str) -> Plot:
    lines: list[Line] = []
    for number, run in enumerate(runs):
        for colour, (name, label) in zip((*CATEGORIES, NEUTRAL), names.items(), strict=False):
            values = [
                (r.round, r.diagnostics[f"{THEORY}{name}"]) for r in run.records if f"{THEORY}{name}" in r.diagnostics
            ]
            if any(value > 0 for _, value in values):
                rounds, found = zip(*values, strict=True)
                shown = [value if value > 0 else GAP for value in found]  # 0 has no place on a logarithmic axis
                lines.append(
                    Line(
                        f"{run.name}, {label}" if len(runs) > 1 else label,
                        rounds,
                        shown,
                        colour,
                        number,
                        run=run.name,
                    )
                )
    return Plot(
        title=title,
        x_label="round",
        y_label=y_label,
        lines=lines,
        summary=f"{what}, by round, on a logarithmic axis. They end at: {last_values(lines, 3, significant=3)}.",
        log_y=True,
        whole_x=True,
        significant=4,
        shared_pointer=True,
        legend_below=True,
    )


# The model of every tier at each client.

MODEL_WIDTH = 0.8  # of the distance between two models: the clients of all groups stand in it side by side


def client_plot(run: Run, runs: Sequence[Run]) -> Plot | None:
    """Return a point for each model and client after the last evaluation; None if no client evaluates.

    Clients are grouped by their devices, or by their tiers if devices are unknown. Each group has its median. Colours
    are those of the clients' tiers; devices have symbols.
    """
    last = next((record for record in reversed(run.evaluated) if record.clients), None)
    if last is None:
        return None
    metric = run.config.objective.headline
    devices = [device.name for device in run.config.federation.device_of]
    colours = tier_colours(runs)
    groups = list(dict.fromkeys(name for found in last.clients.values() for name in _groups(found)))
    step = MODEL_WIDTH / len(groups)
    lines: list[Line] = []
    for number, name in enumerate(groups):
        x: list[float] = []
        y: list[float] = []
        hints: list[str] = []
        median_x: list[float] = []
        median_y: list[float] = []
        tiers: set[str] = set()
        for place, found in enumerate(last.clients.values()):
            members = [one for one in found.each if (devices[one.client] if devices else one.tier) == name]
            if not members:
                continue
            middle = place + (number + 0.5) * step - MODEL_WIDTH / 2
            for position, one in enumerate(members):
                # side by side in the order of their numbers, so that equal values do not hide each other
                x.append(middle + 0.7 * step * ((position + 0.5) / len(members) - 0.5))
                y.append(metric.scaled(one.metrics[metric.name]))
                hints.append(f"client {one.client}, {one.samples:,} samples")
                tiers.add(one.tier)
            if group := _groups(found).get(name):  # a damaged record may lack it
                median = metric.scaled(group.median[metric.name])
                median_x += [middle - 0.45 * step, middle + 0.45 * step, GAP]
                median_y += [median, median, GAP]
        tier = tiers.pop() if len(tiers) == 1 else ""
        colour = colours.get(tier, NEUTRAL)
        symbol = SYMBOLS[number % len(SYMBOLS)] if devices else "circle"
        lines.append(Line(f"median of {name}", median_x, median_y, colour, run=run.name, tier=tier, in_legend=False))
        lines.append(Line(name, x, y, colour, kind="points", run=run.name, tier=tier, hints=hints, symbol=symbol))
    lines.append(_pooled_line(run, metric, last.clients))
    kind = "device" if devices else "tier"
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
        summary="A point for each model and client, in the colour of the client's tier"
        f"{' and with the symbol of its device' if devices else ''}, and the median of each {kind}. {spread}.",
        categories=list(last.clients),
        decimals=metric.decimals,
        legend_title=f"clients {'with device' if devices else 'of tier'}, and their median",
        table=_client_values_sheet(last.clients, metric),
    )


def _groups(found: ClientMetrics) -> dict[str, GroupMetrics]:
    return found.by_device or found.by_tier


def _pooled_line(run: Run, metric: Metric, clients: Mapping[str, ClientMetrics]) -> Line:
    x: list[float] = []
    y: list[float] = []
    for place, found in enumerate(clients.values()):
        pooled = metric.scaled(found.overall.pooled[metric.name])
        x += [place - MODEL_WIDTH / 2, place + MODEL_WIDTH / 2, GAP]
        y += [pooled, pooled, GAP]
    return Line("all samples of all clients", x, y, INK, 1, run=run.name)


def _client_values_sheet(clients: Mapping[str, ClientMetrics], metric: Metric) -> Sheet:
    """Return a row for each client and a column for each model."""
    everybody = {one.client: one for found in clients.values() for one in found.each}
    values = [{one.client: metric.shown(one.metrics[metric.name]) for one in of.each} for of in clients.values()]
    rows = [
        [f"{client}", one.tier, f"{one.samples:,}", *(of_model.get(client, "") for of_model in values)]
        for client, one in sorted(everybody.items())[:MAX_TABLE_ROWS]
    ]
    note = f"The first {len(rows)} of {len(everybody):,} clients." if len(rows) < len(everybody) else ""
    columns = ["client", "its tier", "samples", *(f"model {tier}" for tier in clients)]
    return Sheet(columns, [rows], left=2, note=note, numbers=("client",))


# The layers of every tier's network.

MAX_LAYERS = 60  # more bars could not be told apart


def layer_plot(run: Run, runs: Sequence[Run]) -> Plot | None:
    """Return the parameters of the largest layers, a bar for each tier; None before models are written."""
    if not run.layers:
        return None
    names = list(dict.fromkeys(name for layers in run.layers.values() for name in layers))
    sizes = {name: max(layers[name].parameters for layers in run.layers.values() if name in layers) for name in names}
    names = [name for name in names if sizes[name] > max(sizes.values()) / 200]  # norms would be invisible
    shown = sorted(sorted(names, key=lambda name: -sizes[name])[:MAX_LAYERS], key=names.index)
    colours = tier_colours(runs)
    lines = [
        Line(
            tier,
            [float(place) for place, name in enumerate(shown) if name in layers],
            [layers[name].parameters for name in shown if name in layers],
            colours.get(tier, NEUTRAL),
            kind="bars",
            run=run.name,
            tier=tier,
            hints=[_rank_text(layers[name].rank) for name in shown if name in layers],
        )
        for tier, layers in run.layers.items()
    ]
    total = "; ".join(f"{tier} {sum(layer.parameters for layer in of.values()):,}" for tier, of in run.layers.items())
    return Plot(
        title=f"parameters by layer of {run.name}",
        x_label="layer",
        y_label="parameters",
        lines=lines,
        summary=f"Parameters of the largest layers, a bar for each tier. All layers together: {total}.",
        y_unit="",
        categories=shown,
        decimals=0,
        table=_layer_sheet(run),
    )


def _rank_text(rank: int | None) -> str:
    return "dense" if rank is None else f"rank {rank}"


def _layer_sheet(run: Run) -> Sheet:
    """Return a row for each layer: its parameters in each tier, and its rank if it is factorized."""
    names = list(dict.fromkeys(name for layers in run.layers.values() for name in layers))
    rows = []
    for name in names:
        found = [layers.get(name) for layers in run.layers.values()]
        ranks = ["" if each is None or each.rank is None else f" (r {each.rank})" for each in found]
        cells = ["" if e is None else f"{e.parameters:,}{rank}" for e, rank in zip(found, ranks, strict=True)]
        rows.append([name or ROOT, *cells])
    note = "Parameters, and r, the rank, of a layer that is factorized; the others are dense."
    return Sheet(["layer", *run.layers], [rows], left=1, note=note)


# The clients that took part in each round.

MAX_POINTS = 20_000  # in one plot: the last rounds


def participation_plot(run: Run, runs: Sequence[Run]) -> Plot:
    """Return a point for each client and round, in the colour of its tier, and marks on updates that were not taken."""
    records = _newest(run.records)
    colours = tier_colours(runs)
    tiers = list(dict.fromkeys([*run.tiers, *(p.tier for record in records for p in record.participants)]))
    lines: list[Line] = []
    for tier in tiers:
        points = [(record.round, p.client) for record in records for p in record.participants if p.tier == tier]
        if points:
            rounds, clients = zip(*points, strict=True)
            colour = colours.get(tier, NEUTRAL)
            lines.append(Line(f"{tier} took part", rounds, clients, colour, kind="points", run=run.name, tier=tier))
    if dropped := [(r.round, entry["client"], entry.get("reason", "")) for r in records for entry in r.dropped]:
        rounds, clients, hints = zip(*dropped, strict=True)
        lines.append(Line("dropped", rounds, clients, INK, kind="points", run=run.name, hints=hints, symbol="x"))
    if cut := [(r.round, entry["client"], describe_cut(entry)) for r in records for entry in r.clipped]:
        rounds, clients, hints = zip(*cut, strict=True)
        lines.append(Line("cut", rounds, clients, INK, kind="points", run=run.name, hints=hints, symbol="circle-open"))
    tasks = sum(len(record.participants) for record in records)
    return Plot(
        title=f"who took part in {run.name}",
        x_label="round",
        y_label="client",
        lines=lines,
        summary=f"Clients by round. Tasks taken: {tasks:,}; answers dropped: {len(dropped):,}; "
        f"cut to a bound: {len(cut):,}. The tables name the clients and the reasons.",
        whole_x=True,
        whole_y=True,
        decimals=0,
        table=_participation_sheet(run),
    )


def describe_cut(entry: Mapping[str, object]) -> str:
    """Return how an update was limited, from its entry in a record."""
    if "values" in entry:
        return f"{entry['values']} values brought nearer to those of most clients"
    norm, bound = entry.get("norm"), entry.get("bound")
    against = ", since it went against the others" if "against" in entry else ""
    known = isinstance(norm, int | float) and isinstance(bound, int | float)
    return f"from length {norm:.3g} to {bound:.3g}{against}" if known else ""


def _newest(records: Sequence[Record]) -> list[Record]:
    """Return the last records whose points fit into a plot."""
    kept: list[Record] = []
    points = 0
    for record in reversed(records):
        points += len(record.participants) + len(record.dropped) + len(record.clipped)
        if kept and points > MAX_POINTS:
            break
        kept.append(record)
    return kept[::-1]


def _participation_sheet(run: Run) -> Sheet:
    """Return how often each client took part, and how often its answers were dropped or cut."""
    rounds: Counter[int] = Counter()
    tiers: dict[int, dict[str, None]] = {}
    for record in run.records:
        for participant in record.participants:
            rounds[participant.client] += 1
            tiers.setdefault(participant.client, {})[participant.tier] = None
    dropped = Counter(entry["client"] for record in run.records for entry in record.dropped)
    cut = Counter(entry["client"] for record in run.records for entry in record.clipped)
    everybody = sorted({*rounds, *dropped, *cut})
    shown = sorted(everybody, key=lambda client: (-dropped[client] - cut[client], client))[:MAX_TABLE_ROWS]
    rows = [
        [f"{client}", ", ".join(tiers.get(client, {})), f"{rounds[client]}", f"{dropped[client]}", f"{cut[client]}"]
        for client in sorted(shown)
    ]
    note = "Dropped and cut count answers of any kind, also those of evaluations."
    if len(everybody) > len(shown):
        note += f" {len(shown)} of {len(everybody)} clients: those with the most answers dropped or cut."
    columns = ["client", "tier", "rounds", "dropped", "cut"]
    return Sheet(columns, [rows], left=2, note=note, numbers=("client",))
