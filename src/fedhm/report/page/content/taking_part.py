"""Who took part in which round, whose updates were dropped and why, and whose were cut."""

from collections import Counter
from collections.abc import Sequence

from fedhm.report.page.content.curves import hex_colours
from fedhm.report.page.plot import Line, Plot
from fedhm.report.sheets import Sheet
from fedhm.runs.history import Run
from fedhm.server.record import Record

MOST_POINTS = 20_000  # of one plot; those of the last rounds
MOST_ROWS = 200


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
    shown = sorted(everybody, key=lambda client: (-dropped[client] - cut[client], client))[:MOST_ROWS]
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
    note = f"The last {MOST_ROWS} of {len(rows):,}; records.jsonl has all of them." if len(rows) > MOST_ROWS else ""
    return Sheet(columns, [rows[-MOST_ROWS:]], left=5, title=title, note=note, numbers=("round", "client"))


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
