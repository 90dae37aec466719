"""A row for each run and tier: what it costs and how well it does."""

import csv
import io
from collections.abc import Sequence

from rich.table import Table

from fedhm.report.client_table import client_sheet
from fedhm.report.comparable import difference
from fedhm.report.fleet_table import time_sheet
from fedhm.report.sheets import Sheet, markdown_table, readable_bytes, readable_macs, rich_table
from fedhm.runs.history import Run

WHICH = ("run", "method", "round", "tier")
COSTS = ("parameters", "MACs/sample", "bytes/round")
WIDE = 110  # characters that a table of several runs takes


def sheet(runs: Sequence[Run]) -> Sheet:
    """Return the table of runs; what is the same in all rows of a single run goes into the title.

    Bytes per round are of one client of the tier, down and up; metrics are those of the last evaluated round.
    """
    metrics = metric_names(runs)
    groups = [_rows(run, metrics) for run in runs]
    whole = Sheet([*WHICH, *COSTS, *metrics], groups, left=len(WHICH), note=caption(runs), numbers=("round",))
    if len(runs) > 1:
        return whole
    name, method, last = groups[0][0][:3]
    only_tiers = [[row[3:] for row in groups[0]]]
    return Sheet(whole.columns[3:], only_tiers, left=1, title=f"{name}: {method}, round {last}", note=whole.note)


def metric_names(runs: Sequence[Run]) -> list[str]:
    """Return the metrics of all runs, each once: runs with several objectives have several."""
    return list(dict.fromkeys(metric.name for run in runs for metric in run.config.objective.metrics))


def _rows(run: Run, metrics: Sequence[str]) -> list[list[str]]:
    last = run.evaluated[-1]
    which = (run.name, run.config.method.name, f"{last.round}/{run.config.train.rounds}")
    rows: list[list[str]] = []
    for tier in run.tiers:
        cost = run.costs[tier]
        costs = (f"{cost.parameters:,}", readable_macs(cost.macs), readable_bytes(run.bytes_per_client(tier)))
        of_tier = last.metrics[tier]
        shown = {m.name: m.shown(of_tier[m.name]) for m in run.config.objective.metrics if m.name in of_tier}
        rows.append([*which, tier, *costs, *(shown.get(name, "") for name in metrics)])
    return rows


def caption(runs: Sequence[Run]) -> str:
    """Return a note on what the columns leave out."""
    text = "bytes/round: one client's training, down and up."
    for run in runs:
        whose = f" of {run.name}" if len(runs) > 1 else ""
        if run.evaluated_at_clients:
            names = " and ".join(metric.name for metric in run.config.objective.metrics)
            text += f" {names}{whose}: on the clients' own test samples, all together."
        text += _promise(run) + _ending(run)
        if gathering := run.statistics_bytes():
            text += f" Gathering BatchNorm statistics{whose} adds {readable_bytes(gathering)} a client when evaluated."
    return text


def _promise(run: Run) -> str:
    """Return what a private run promises its clients, if it is one: docs/privacy.md says what that means."""
    privacy, epsilon = run.config.privacy, run.records[-1].epsilon
    if not privacy.active:
        return ""
    if epsilon is None:
        return f" {run.name}: changes are bounded by {privacy.clip:g}, without noise, so nothing is promised."
    return (
        f" {run.name}: every client has ε = {epsilon:.3g} at δ = {privacy.delta:g} of differential privacy, by noise "
        f"{privacy.noise:g} × {privacy.clip:g} at the {privacy.where}."
    )


def _ending(run: Run) -> str:
    """Return why a run ended before its last round, and where the models of its best one are, if that is so."""
    last = run.records[-1]
    stopped = f" {run.name} stopped after round {last.round}: {last.stopped}." if last.stopped else ""
    best = f" The best round of {run.name} was {run.best}: models/best-round-{run.best}." if run.best else ""
    return stopped + best


def rich_tables(runs: Sequence[Run], width: int) -> list[Table]:
    """Return one table for all runs where the terminal has the room, otherwise one for each."""
    together = [runs] if width >= WIDE else [[run] for run in runs]
    sheets = [*(sheet(group) for group in together), *_client_sheets(runs)]
    return [rich_table(each, spacious=True) for each in sheets]


def _client_sheets(runs: Sequence[Run]) -> list[Sheet]:
    """Return the tables of clients and of their devices, of runs that have such."""
    return [found for run in runs for make in (client_sheet, time_sheet) if (found := make(run))]


def markdown(runs: Sequence[Run]) -> str:
    found = difference(runs)
    tables = [markdown_table(each) for each in (sheet(runs), *_client_sheets(runs))]
    return "\n".join(tables) + (f"\nNot comparable: {found}.\n" if found else "")


def as_csv(runs: Sequence[Run]) -> str:
    """Return plain numbers, a line for each run, evaluated round and tier."""
    metrics = metric_names(runs)
    out = io.StringIO()
    writer = csv.writer(out)
    private = any(record.epsilon is not None for run in runs for record in run.records)
    timed = any(run.seconds_so_far() for run in runs)
    more = [*(["epsilon"] if private else []), *(["simulated_seconds_so_far"] if timed else [])]
    writer.writerow([*WHICH, "parameters", "macs", "client_bytes_so_far", *metrics, *more])
    for run in runs:
        seconds = run.seconds_so_far()
        for record in run.evaluated:
            for tier, of_tier in record.metrics.items():
                cost = run.costs[tier]
                which = [run.name, run.config.method.name, record.round, tier]
                sent = run.bytes_per_client(tier)
                so_far = "" if sent is None else record.round * sent
                values = (of_tier.get(name, "") for name in metrics)
                stated: list[float | str] = ["" if record.epsilon is None else record.epsilon] if private else []
                stated += [seconds[record.round - 1] if seconds else ""] if timed else []
                writer.writerow([*which, cost.parameters, cost.macs, so_far, *values, *stated])
    return out.getvalue()
