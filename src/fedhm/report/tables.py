"""A row for each run and tier: what it costs and how well it does."""

import csv
import io
from collections.abc import Sequence

from rich.table import Table

from fedhm.report.comparable import difference
from fedhm.runs.history import Run

COLUMNS = ("run", "method", "round", "tier", "parameters", "MACs/sample", "bytes/round", "accuracy", "loss")
LEFT = ("run", "method", "tier")


def rows(run: Run) -> list[tuple[str, ...]]:
    """Bytes per round are of one client of the tier, down and up; accuracy is that of the last evaluated round."""
    last = run.evaluated[-1]
    which = (run.name, run.config.method.name, f"{last.round}/{run.config.train.rounds}")
    return [
        (
            *which,
            tier,
            f"{run.costs[tier].parameters:,}",
            readable_macs(run.costs[tier].macs),
            readable_bytes(run.bytes_per_client(tier)),
            f"{100 * last.scores[tier].accuracy:.2f} %",
            f"{last.scores[tier].loss:.4f}",
        )
        for tier in run.tiers
    ]


def _table(runs: Sequence[Run]) -> tuple[str, tuple[str, ...], list[list[tuple[str, ...]]]]:
    """Title, columns, and each run's rows; what is the same in all rows of a single run goes into the title."""
    all_rows = [rows(run) for run in runs]
    if len(runs) > 1:
        return "", COLUMNS, all_rows
    name, method, last = all_rows[0][0][:3]
    return f"{name}: {method}, round {last}", COLUMNS[3:], [[row[3:] for row in all_rows[0]]]


def caption(runs: Sequence[Run]) -> str:
    """What the columns leave out."""
    text = "bytes/round: one client's training, down and up."
    for run in runs:
        if gathering := run.statistics_bytes():
            whose = f" of {run.name}" if len(runs) > 1 else ""
            text += f" Gathering BatchNorm statistics{whose} adds {readable_bytes(gathering)} a client when evaluated."
    return text


def rich_tables(runs: Sequence[Run], width: int) -> list[Table]:
    """One table for all runs where the terminal has the room, otherwise one for each."""
    return [_rich_table(runs)] if width >= 110 else [_rich_table([run]) for run in runs]


def _rich_table(runs: Sequence[Run]) -> Table:
    title, columns, groups = _table(runs)
    table = Table(title=title or None, title_justify="left", caption=caption(runs), caption_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT else "right")
    for group in groups:
        for row in group:
            table.add_row(*row, end_section=row is group[-1])
    return table


def markdown(runs: Sequence[Run]) -> str:
    title, columns, groups = _table(runs)
    lines = [f"### {title}", ""] if title else []
    lines += ["| " + " | ".join(columns) + " |"]
    lines += ["|" + "|".join("---" if column in LEFT else "--:" for column in columns) + "|"]
    lines += ["| " + " | ".join(row) + " |" for group in groups for row in group]
    lines += ["", caption(runs)]
    if found := difference(runs):
        lines += ["", f"Not comparable: {found}."]
    return "\n".join(lines) + "\n"


def as_csv(runs: Sequence[Run]) -> str:
    """Plain numbers, a line for each run, evaluated round and tier."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["run", "method", "round", "tier", "parameters", "macs", "client_bytes_so_far", "accuracy", "loss"])
    for run in runs:
        for record in run.evaluated:
            for tier, score in record.scores.items():
                cost = run.costs[tier]
                where = [run.name, run.config.method.name, record.round, tier]
                sent = run.bytes_per_client(tier)
                so_far = "" if sent is None else record.round * sent
                writer.writerow([*where, cost.parameters, cost.macs, so_far, *score])
    return out.getvalue()


def readable_macs(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count / 1e3:,.1f} k"


def readable_bytes(count: float | None) -> str:
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    raise AssertionError
