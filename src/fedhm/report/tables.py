"""A row for each tier: what it costs and how well it does."""

import csv
import io
from collections.abc import Sequence

from rich.table import Table

from fedhm.report.runs import Run

COLUMNS = ("tier", "parameters", "MACs/sample", "bytes/round", "accuracy", "loss")


def rows(run: Run) -> list[tuple[str, ...]]:
    """Bytes per round are of one client of the tier, down and up; accuracy is that of the last evaluated round."""
    last = run.evaluated[-1]
    return [
        (
            tier,
            f"{run.costs[tier].parameters:,}",
            f"{run.costs[tier].macs / 1e6:,.1f} M",
            readable_bytes(run.bytes_per_client(tier)),
            f"{100 * last.scores[tier].accuracy:.2f} %",
            f"{last.scores[tier].loss:.4f}",
        )
        for tier in run.tiers
    ]


def title(run: Run) -> str:
    last = run.evaluated[-1].round
    return f"{run.name}: {run.config.method.name}, round {last} of {run.config.train.rounds}"


def caption(run: Run) -> str:
    """What the table's columns leave out."""
    gathering = run.statistics_bytes()
    adds = f" Gathering BatchNorm statistics adds {readable_bytes(gathering)} a client in rounds that are evaluated."
    return "bytes/round: one client's training, down and up." + (adds if gathering else "")


def rich_table(run: Run) -> Table:
    table = Table(title=title(run), title_justify="left", caption=caption(run), caption_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "tier" else "right")
    for row in rows(run):
        table.add_row(*row)
    return table


def markdown(runs: Sequence[Run]) -> str:
    parts: list[str] = []
    for run in runs:
        lines = [
            f"### {title(run)}",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|---" + "|--:" * (len(COLUMNS) - 1) + "|",
        ]
        lines += ["| " + " | ".join(row) + " |" for row in rows(run)]
        parts.append("\n".join([*lines, "", caption(run)]))
    return "\n\n".join(parts) + "\n"


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


def readable_bytes(count: float | None) -> str:
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    raise AssertionError
