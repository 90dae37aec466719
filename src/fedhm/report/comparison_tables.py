"""A comparison as tables: accuracy by capability level, and what each tier spent."""

import csv
import io
from collections.abc import Callable, Sequence

from rich.table import Table

from fedhm.report.compared import Compared, Spread, computed, sent, so_far
from fedhm.report.comparison import Comparison, Place, arrange
from fedhm.report.tables import readable_bytes, readable_macs

SPENT = ("entry", "tier", "parameters", "MACs/sample", "bytes/client/round", "bytes in all", "MACs in all", "accuracy")
CSV = (
    *("entry", "seed", "round", "tier", "parameters", "macs"),
    *("federation_bytes_so_far", "federation_macs_so_far", "accuracy", "loss"),
)
CAPTION = (
    "Parameters of the tier, accuracy in percent after the last round{over}; ×n: n capability levels train it. "
    "Best accuracy of a row in bold."
)
SPENT_CAPTION = (
    "bytes/client/round: one client's training, down and up. In all: what the tier's clients sent and computed for "
    "training in all rounds{over}."
)
COLUMN = 24  # how wide a method's column is in a terminal


def rich_tables(entries: Sequence[Compared], width: int) -> list[Table]:
    """The table of accuracies, as several where the terminal is too narrow; then what was spent."""
    comparison = arrange(entries)
    names = list(comparison.columns)
    at_once = max(1, (width - 10) // COLUMN)
    parts = [names[start : start + at_once] for start in range(0, len(names), at_once)]
    tables = [_accuracies(comparison, part) for part in parts]
    tables[-1].caption = _over(CAPTION, entries, " (mean ± deviation over {} seeds)")
    return [*tables, _spent(entries)]


def _accuracies(comparison: Comparison, names: Sequence[str]) -> Table:
    table = Table(caption_justify="left")
    table.add_column("tier")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(comparison.rows):
        cells = [_cell(comparison, name, number, lambda text: f"[bold]{text}[/bold]") for name in names]
        table.add_row(row, *cells)
    return table


def _spent(entries: Sequence[Compared]) -> Table:
    caption = _over(SPENT_CAPTION, entries, ", mean of {} seeds")
    table = Table(title="what each tier spent", title_justify="left", caption=caption, caption_justify="left")
    for column in SPENT:
        table.add_column(column, justify="left" if column in SPENT[:2] else "right")
    for entry in entries:
        rows = spent_rows(entry)
        for row in rows:
            table.add_row(*row, end_section=row is rows[-1])
    return table


def spent_rows(entry: Compared) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for tier in entry.tiers:
        cost = entry.first.costs[tier]
        sizes = (f"{cost.parameters:,}", readable_macs(cost.macs), readable_bytes(entry.client_bytes(tier)))
        totals = (readable_bytes(entry.bytes(tier)), _work(entry.macs(tier)))
        rows.append((entry.label, tier, *sizes, *totals, _percent(entry.accuracy(tier))))
    if len(entry.tiers) > 1:
        rows.append((entry.label, "all", "", "", "", readable_bytes(entry.bytes()), _work(entry.macs()), ""))
    return rows


def markdown(entries: Sequence[Compared]) -> str:
    """Both tables."""
    comparison = arrange(entries)
    lines = _header(["tier", *comparison.columns], left=1)
    for number, row in enumerate(comparison.rows):
        cells = [_cell(comparison, name, number, lambda text: f"**{text}**") for name in comparison.columns]
        lines.append("| " + " | ".join([row, *cells]) + " |")
    lines += ["", _over(CAPTION, entries, " (mean ± deviation over {} seeds)"), "", "### What each tier spent", ""]
    lines += _header(SPENT, left=2)
    lines += ["| " + " | ".join(row) + " |" for entry in entries for row in spent_rows(entry)]
    return "\n".join([*lines, "", _over(SPENT_CAPTION, entries, ", mean of {} seeds")]) + "\n"


def as_csv(entries: Sequence[Compared]) -> str:
    """Plain numbers, a line for each entry, seed, evaluated round and tier."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(CSV)
    for entry in entries:
        for run in entry.runs:
            bytes_so_far, macs_so_far = so_far(run, sent), so_far(run, computed)
            for record in run.evaluated:
                spent = (bytes_so_far[record.round - 1], macs_so_far[record.round - 1])
                for tier, score in record.scores.items():
                    cost = run.costs[tier]
                    where = (entry.label, run.config.seed, record.round, tier)
                    writer.writerow([*where, cost.parameters, cost.macs, *spent, *score])
    return out.getvalue()


def _cell(comparison: Comparison, column: str, row: int, bold: Callable[[str], str]) -> str:
    place = comparison.columns[column].get(row)
    if place is None:
        return ""
    accuracy = _percent(place.accuracy)
    best = round(place.accuracy.mean, 2) == comparison.best(row)
    return f"{_size(place)}  {bold(accuracy) if best else accuracy}"


def _size(place: Place) -> str:
    count = place.parameters
    shown = f"{count / 1e6:.2f} M" if count >= 1e6 else f"{count / 1e3:.1f} k"
    return f"{shown} ×{place.shares}" if place.shares > 1 else shown


def _percent(accuracy: Spread) -> str:
    return f"{accuracy.mean:.2f}" + ("" if accuracy.deviation is None else f" ± {accuracy.deviation:.2f}")


def _work(macs: float) -> str:
    for unit in ("M", "G", "T"):
        macs /= 1000 if unit != "M" else 1e6
        if macs < 1000:
            break
    return f"{macs:,.1f} {unit}"


def _over(text: str, entries: Sequence[Compared], seeds: str) -> str:
    count = len(entries[0].runs)
    return text.format(over=seeds.format(count) if count > 1 else "")


def _header(columns: Sequence[str], left: int) -> list[str]:
    marks = ["---" if number < left else "--:" for number in range(len(columns))]
    return ["| " + " | ".join(columns) + " |", "|" + "|".join(marks) + "|"]
