"""Every metric of every tier by round, by bytes, by computation and, where it is known, by simulated time."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from matplotlib.colors import to_hex

from fedhm.config.objective import Metric
from fedhm.measure.cost import ROOT
from fedhm.report.comparable import difference
from fedhm.report.figures.energy import energies_by_tier
from fedhm.report.figures.plots import tier_colours
from fedhm.report.plot import MOST_ROWS, Line, Plot, ends
from fedhm.report.sheets import Sheet
from fedhm.report.tables import clients_summary_sheet, sheet, time_sheet
from fedhm.runs.history import Run
from fedhm.server.record import ClientMetrics, Record

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


# What records tell beside the metrics, by round: the spectrum, and ε of private runs.

RUN_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")


def spectrum(runs: Sequence[Run]) -> Plot | None:
    """Return the energy beyond each tier's rank; None where no run's method knows it."""
    colours = hex_colours(runs)
    lines: list[Line] = []
    for number, run in enumerate(runs):
        for tier, found in energies_by_tier(run).items():
            label = f"{run.name}, {tier}" if len(runs) > 1 else tier
            percent = [100 * energy for energy in found.values()]
            lines.append(
                Line(label, list(found), percent, colours.get(tier, "#888888"), number, run=run.name, tier=tier)
            )
    if not lines:
        return None
    return Plot(
        title="energy beyond each rank by round",
        x_label="round",
        y_label="squared norm beyond the tier's rank (%)",
        lines=lines,
        summary="The share of the model's squared norm that lies beyond each tier's rank, by round, on a logarithmic "
        f"axis: where lines fall, the model shrinks to its small tiers. They end at: {ends(lines, 3)}.",
        log_y=True,
        whole_x=True,
        together=True,
    )


def privacy(runs: Sequence[Run]) -> Plot | None:
    """Return ε by round; None where no run is private."""
    lines: list[Line] = []
    for number, run in enumerate(runs):
        counted = [(record.round, record.epsilon) for record in run.records if record.epsilon is not None]
        if counted:
            label = f"{run.name}, noise {run.config.privacy.noise:g}, δ = {run.config.privacy.delta:g}"
            rounds, epsilons = zip(*counted, strict=True)
            colour = RUN_COLOURS[number % len(RUN_COLOURS)]
            lines.append(Line(label, rounds, epsilons, colour, number, run=run.name))
    if not lines:
        return None
    return Plot(
        title="ε by round",
        x_label="round",
        y_label="ε of differential privacy, of every client",
        lines=lines,
        summary=f"What private runs promise every client, by round. ε ends at: {ends(lines, 3)}.",
        whole_x=True,
        together=True,
    )


# How every tier's model does at each client, where clients evaluate.

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
        numbers=_each_client_sheet(last.clients, metric),
    )


def _each_client_sheet(clients: Mapping[str, ClientMetrics], metric: Metric) -> Sheet:
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


# The ranks and parameters of every tier's network, layer by layer, as its file has them.

MOST_LAYERS = 60  # of the plot: more could not be told apart


def parameters_by_layer(run: Run, runs: Sequence[Run]) -> Plot | None:
    """Return bars for the layers that have most of the parameters; None before models are written."""
    if not run.layers:
        return None
    names = list(dict.fromkeys(name for layers in run.layers.values() for name in layers))
    sizes = {name: max(layers[name].parameters for layers in run.layers.values() if name in layers) for name in names}
    names = [name for name in names if sizes[name] > max(sizes.values()) / 200]  # norms would be invisible
    chosen = sorted(sorted(names, key=lambda name: -sizes[name])[:MOST_LAYERS], key=names.index)
    colours = hex_colours(runs)
    lines = [
        Line(
            tier,
            [float(place) for place, name in enumerate(chosen) if name in layers],
            [layers[name].parameters for name in chosen if name in layers],
            colours.get(tier, "#888888"),
            kind="bars",
            run=run.name,
            tier=tier,
            hints=[_rank(layers[name].rank) for name in chosen if name in layers],
        )
        for tier, layers in run.layers.items()
    ]
    total = "; ".join(f"{tier} {sum(layer.parameters for layer in of.values()):,}" for tier, of in run.layers.items())
    return Plot(
        title=f"parameters by layer of {run.name}",
        x_label="layer",
        y_label="parameters",
        lines=lines,
        summary=f"Parameters of the layers that have most of them, a bar for each tier. All layers together: {total}.",
        categories=chosen,
        decimals=0,
        numbers=_layer_sheet(run),
    )


def _layer_sheet(run: Run) -> Sheet:
    """Return a row for each layer: parameters and, where it is factorized, the rank of each tier."""
    names = list(dict.fromkeys(name for layers in run.layers.values() for name in layers))
    rows = []
    for name in names:
        found = [layers.get(name) for layers in run.layers.values()]
        cells = ("" if each is None else f"{each.parameters:,}{_short(each.rank)}" for each in found)
        rows.append([name or ROOT, *cells])
    note = "Parameters, and r, the rank, of a layer that is factorized; the others are dense."
    return Sheet(["layer", *run.layers], [rows], left=1, note=note)


def _rank(rank: int | None) -> str:
    return "dense" if rank is None else f"rank {rank}"


def _short(rank: int | None) -> str:
    return "" if rank is None else f" (r {rank})"


# The settings of runs side by side; what differs between them is bold.


def settings_sheet(runs: Sequence[Run]) -> Sheet:
    """Return a row for each setting, those that differ first; a private run's secret is no setting."""
    found = [{key: str(value) for key, value in run.config.dotted().items()} for run in runs]
    keys = list(dict.fromkeys(key for of_run in found for key in of_run))
    differing = [key for key in keys if len({of_run.get(key) for of_run in found}) > 1]
    same = [key for key in keys if key not in differing]
    rows = [
        [[key, *(_cell(of_run.get(key), key in differing) for of_run in found)] for key in group]
        for group in (differing, same)
        if group
    ]
    note = "In bold what differs between the runs." if len(runs) > 1 else ""
    columns = ["setting", *(run.name for run in runs)]
    return Sheet(columns, rows, left=len(columns), title="", note=note)


def _cell(value: str | None, bold: bool) -> str:
    shown = "–" if value is None else value or "(empty)"
    return f"**{shown}**" if bold else shown


# Who took part in which round, whose updates were dropped and why, and whose were cut.

MOST_POINTS = 20_000  # of one plot; those of the last rounds
MOST_TABLE_ROWS = 200


def who_took_part(run: Run, runs: Sequence[Run]) -> Plot:
    """Return a point for each client and round, in the colour of its tier, with marks on what was not taken as sent."""
    records = _newest(run.records)
    colours = hex_colours(runs)
    tiers = list(dict.fromkeys([*run.tiers, *(p.tier for record in records for p in record.participants)]))
    lines: list[Line] = []
    for tier in tiers:
        there = [(record.round, p.client) for record in records for p in record.participants if p.tier == tier]
        if there:
            rounds, clients = zip(*there, strict=True)
            colour = colours.get(tier, "#888888")
            lines.append(Line(f"{tier} took part", rounds, clients, colour, kind="points", run=run.name, tier=tier))
    for label, symbol, colour, entries in (
        ("dropped", "x", "#d62728", [(r.round, e["client"], e.get("reason", "")) for r in records for e in r.dropped]),
        ("cut", "circle-open", "#ff7f0e", [(r.round, e["client"], _cut(e)) for r in records for e in r.clipped]),
    ):
        if entries:
            rounds, clients, hints = zip(*entries, strict=True)
            lines.append(Line(label, rounds, clients, colour, kind="points", run=run.name, hints=hints, symbol=symbol))
    took = sum(len(record.participants) for record in records)
    dropped, cut = (sum(len(getattr(record, what)) for record in records) for what in ("dropped", "clipped"))
    return Plot(
        title=f"who took part in {run.name}",
        x_label="round",
        y_label="client",
        lines=lines,
        summary=f"Clients by round. Tasks taken: {took:,}; answers dropped: {dropped:,}; cut to a bound: {cut:,}. "
        "The tables have who, and why.",
        whole_x=True,
        whole_y=True,
        decimals=0,
        numbers=clients_sheet(run),
    )


def clients_sheet(run: Run) -> Sheet:
    """Return how often each client took part, and what became of that."""
    took: Counter[int] = Counter()
    tiers: dict[int, dict[str, None]] = {}
    for record in run.records:
        for participant in record.participants:
            took[participant.client] += 1
            tiers.setdefault(participant.client, {})[participant.tier] = None
    dropped = Counter(entry["client"] for record in run.records for entry in record.dropped)
    cut = Counter(entry["client"] for record in run.records for entry in record.clipped)
    everybody = sorted({*took, *dropped, *cut})
    shown = sorted(everybody, key=lambda client: (-dropped[client] - cut[client], client))[:MOST_TABLE_ROWS]
    rows = [
        [f"{client}", ", ".join(tiers.get(client, {})), f"{took[client]}", f"{dropped[client]}", f"{cut[client]}"]
        for client in sorted(shown)
    ]
    note = "Dropped and cut: answers of any kind, also those of evaluations."
    if len(everybody) > len(shown):
        note += f" {len(shown)} of {len(everybody)} clients: those of whom most was dropped or cut."
    columns = ["client", "tier", "rounds", "dropped", "cut"]
    return Sheet(columns, [rows], left=2, note=note, numbers=("client",))


def dropped_sheet(run: Run) -> Sheet | None:
    """Return what was not merged, and why; None if there is nothing."""
    rows = [
        [f"{record.round}", f"{entry['client']}", str(entry.get("tier", "")), str(entry.get("kind", "")), *_why(entry)]
        for record in run.records
        for entry in record.dropped
    ]
    return _of_rounds("Dropped", ["round", "client", "tier", "work", "why"], rows)


def cut_sheet(run: Run) -> Sheet | None:
    """Return what went further than its bound, and was cut to it; None if there is nothing."""
    rows = [
        [f"{record.round}", f"{entry['client']}", str(entry.get("tier", "")), str(entry.get("part", "")), _cut(entry)]
        for record in run.records
        for entry in record.clipped
    ]
    return _of_rounds("Cut to a bound", ["round", "client", "tier", "part", "how"], rows)


def _of_rounds(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Sheet | None:
    if not rows:
        return None
    note = (
        f"The last {MOST_TABLE_ROWS} of {len(rows):,}; records.jsonl has all of them."
        if len(rows) > MOST_TABLE_ROWS
        else ""
    )
    return Sheet(columns, [rows[-MOST_TABLE_ROWS:]], left=5, title=title, note=note, numbers=("round", "client"))


def _why(entry: dict[str, object]) -> list[str]:
    return [str(entry.get("reason", ""))]


def _cut(entry: dict[str, object]) -> str:
    if "values" in entry:
        return f"{entry['values']} values brought nearer to those of most clients"
    norm, bound = entry.get("norm"), entry.get("bound")
    against = ", since it went against the others" if "against" in entry else ""
    known = isinstance(norm, int | float) and isinstance(bound, int | float)
    return f"from length {norm:.3g} to {bound:.3g}{against}" if known else ""


def _newest(records: Sequence[Record]) -> list[Record]:
    chosen: list[Record] = []
    points = 0
    for record in reversed(records):
        points += len(record.participants) + len(record.dropped) + len(record.clipped)
        if chosen and points > MOST_POINTS:
            break
        chosen.append(record)
    return chosen[::-1]


# What stands on the page of one or several runs, in its order.

Part = str | Plot | Sheet


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it: sentences, plots and tables."""

    heading: str
    parts: Sequence[Part]
    folded: bool = False  # for who opens it


@dataclass(frozen=True)
class Switch:
    """What can be turned off on the page: lines whose `kind`, run or tier, has one of these names."""

    kind: str
    label: str
    names: Sequence[str]


def run_sections(runs: Sequence[Run]) -> list[Section]:
    """Return the sections of runs, those that have something to tell."""
    evaluated = [run for run in runs if run.evaluated]
    sections = [
        Section("Rounds", [_state(run) for run in runs]),
        Section("Tiers", _tiers(evaluated)),
        *_metric_sections(evaluated),
        Section("At the clients", _at_clients(evaluated)),
        Section("Spectrum", _known([spectrum(runs)])),
        Section("Privacy", _known([privacy(runs)])),
        Section("Who took part", _taking_part([run for run in runs if run.records])),
        Section("Layers", _layers(runs)),
        Section("Settings", [settings_sheet(runs)]),
    ]
    return [section for section in sections if section.parts]


def _state(run: Run) -> str:
    done, rounds = len(run.records), run.config.train.rounds
    stopped = run.records[-1].stopped if run.records else ""
    if stopped:
        return f"{run.name} stopped after round {done} of {rounds}: {stopped}."
    if done >= rounds:
        return f"{run.name} has done {f'all of its {rounds} rounds' if rounds > 1 else 'its only round'}."
    return f"{run.name} has done {done} of its {rounds} rounds."


def _tiers(runs: Sequence[Run]) -> list[Part]:
    if not runs:
        return ["No round has been evaluated yet."]
    found = difference(runs)
    return [sheet(runs), *([f"Not comparable: {found}."] if found else [])]


def _metric_sections(runs: Sequence[Run]) -> list[Section]:
    headlines = {run.config.objective.headline for run in runs}
    return [Section(m.name.capitalize(), curves(runs, m), folded=m not in headlines) for m in metrics_of(runs)]


def _at_clients(runs: Sequence[Run]) -> list[Part]:
    return _known(part for run in runs for part in (at_each_client(run, runs), clients_summary_sheet(run)))


def _taking_part(runs: Sequence[Run]) -> list[Part]:
    parts: list[Part] = []
    for run in runs:
        devices = _known([time_sheet(run)])
        parts += [who_took_part(run, runs), *devices, *_of(run, dropped_sheet(run), cut_sheet(run))]
    return parts


def _of(run: Run, *sheets: Sheet | None) -> list[Sheet]:
    return [replace(each, title=f"{each.title}, {run.name}") for each in sheets if each]


def _layers(runs: Sequence[Run]) -> list[Part]:
    """Return the layers of each network once: runs of the same networks share a plot."""
    parts: list[Part] = []
    shown: dict[str, str] = {}
    for run in runs:
        same = shown.get(repr(run.layers))
        if run.layers and same:
            parts.append(f"{run.name} has the same networks as {same}.")
        elif plot := parameters_by_layer(run, runs):
            parts.append(plot)
            shown[repr(run.layers)] = run.name
        else:
            parts.append(f"The layers of {run.name} stand here once its models are written, after its last round.")
    return parts


def _known(parts: Iterable[Part | None]) -> list[Part]:
    return [part for part in parts if part is not None]
