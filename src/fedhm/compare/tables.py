"""The tables of a comparison. The rows of the first are capability levels, its columns are methods."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedhm.compare.results import (
    EntryRuns,
    Spread,
    TargetCost,
    TargetTime,
    bytes_sent,
    cumulative,
    macs_computed,
    spread,
)
from fedhm.config.objective import Metric
from fedhm.report.format import format_bytes, format_macs, format_parameters, format_total_macs
from fedhm.report.sheets import Sheet, csv_text
from fedhm.runs.history import Run

MIN_SEEDS_FOR_BOLD = 3  # the deviation of two differences says next to nothing


@dataclass(frozen=True)
class TableCell:
    """One tier of an entry: a cell of the first table."""

    entry: EntryRuns
    tier: str
    shares: int  # how many capability levels train this tier

    @property
    def parameters(self) -> int:
        return self.entry.first.costs[self.tier].parameters

    @property
    def final(self) -> Spread:
        return self.entry.final(self.tier)

    @property
    def curve(self) -> list[tuple[int, Spread]]:
        return self.entry.curve(self.tier)

    def spent_so_far(self, spent: Callable[[Run], Sequence[float]]) -> list[float]:
        """Return the cost up to each evaluated round, mean over the seeds."""
        sums = [spent(run) for run in self.entry.runs]
        return [statistics.fmean(of_run[n - 1] for of_run in sums) for n, _ in self.curve]

    def minus(self, other: "TableCell") -> Spread:
        """Return the difference of the metric, paired by seed: effects of the seed on both cancel."""
        own, others = self.entry.finals(self.tier), other.entry.finals(other.tier)
        return spread([own[seed] - others[seed] for seed in own])


@dataclass(frozen=True)
class Comparison:
    """The first table. A column is a method, or a family of methods with one tier each."""

    rows: Sequence[str]  # the capability levels, named as the reference's tiers, strongest first
    columns: dict[str, dict[int, TableCell]]  # column → row number → cell
    reference: EntryRuns  # whose tiers are the rows

    @property
    def metric(self) -> Metric:
        return self.reference.metric

    @property
    def evaluated_on(self) -> str:
        return self.reference.first.config.evaluated_on

    def column(self, entry: EntryRuns) -> str:
        return next(name for name, cells in self.columns.items() if entry in (p.entry for p in cells.values()))

    def best(self, row: int) -> TableCell | None:
        """Return the cell that is better than every other in its row by more than one deviation of their difference.

        With fewer than three seeds there is none.
        """
        if len(self.reference.runs) < MIN_SEEDS_FOR_BOLD:
            return None
        cells = [cells[row] for cells in self.columns.values() if row in cells]
        for cell in cells:
            others = [other for other in cells if other is not cell]
            if others and all(self._better(cell.minus(other)) for other in others):
                return cell
        return None

    def _better(self, difference: Spread) -> bool:
        gain = difference.mean if self.metric.more_is_better else -difference.mean
        return difference.deviation is not None and gain > difference.deviation


def arrange_table(entries: Sequence[EntryRuns]) -> Comparison:
    """Arrange entries in a table. The entry with the most tiers gives the rows."""
    reference = max(entries, key=lambda entry: len(entry.tiers))
    sizes = [reference.first.costs[tier].parameters for tier in reference.tiers]
    columns: dict[str, dict[int, TableCell]] = {}
    for entry in entries:
        cells = _rows_of(entry, sizes)
        column = entry.first.config.method.column or entry.label
        if cells.keys() & columns.get(column, {}).keys():
            column = entry.label
        columns.setdefault(column, {}).update(cells)
    return Comparison(reference.tiers, columns, reference)


def _rows_of(entry: EntryRuns, sizes: Sequence[int]) -> dict[int, TableCell]:
    """Find the row of each tier: by capability level if there are as many, otherwise by the nearest size."""
    cells: dict[int, TableCell] = {}
    for tier in entry.tiers:
        for_everybody = len(entry.tiers) == 1 and len(set(entry.first.config.method.shares)) < 2
        shares = len(sizes) if for_everybody else entry.levels.count(tier)
        shares = 1 if entry.first.config.federation.devices else shares  # devices choose the tier, not levels
        if len(entry.levels) == len(sizes):
            row = len(sizes) - 1 - entry.levels[::-1].index(tier)
        else:
            size = math.log(entry.first.costs[tier].parameters)
            free = [number for number in range(len(sizes)) if number not in cells]
            row = min(free, key=lambda number: abs(math.log(sizes[number]) - size))
        cells[row] = TableCell(entry, tier, shares)
    return cells


CSV = (
    *("entry", "seed", "round", "tier", "parameters", "macs"),
    *("federation_bytes_so_far", "federation_macs_so_far"),
)


def metric_sheet(comparison: Comparison, seeds: int) -> Sheet:
    """Return the metric by capability level, a column for each method, as in the tables of the FedHM paper."""
    rows = [
        [level, *(_cell_text(comparison, cells.get(number), number) for cells in comparison.columns.values())]
        for number, level in enumerate(comparison.rows)
    ]
    over = f", mean ± deviation over {seeds} seeds" if seeds > 1 else ""
    bold = (
        "Bold: better than every other entry in the row by more than one standard deviation of the paired difference"
        if seeds >= MIN_SEEDS_FOR_BOLD
        else f"Nothing is bold: it takes at least {MIN_SEEDS_FOR_BOLD} seeds to tell a difference from chance"
    )
    note = (
        f"Parameters, and {comparison.evaluated_on} {comparison.metric.quoted} after the last round{over}. "
        f"{_best_note(comparison.evaluated_on)} {bold}. ×n: n of the capability levels train this model."
        f"{_declared_note(comparison)}"
    )
    return Sheet(["tier", *comparison.columns], [rows], left=1, note=note)


def difference_sheet(comparison: Comparison) -> Sheet:
    """Return the difference of each method from the one whose tiers are the rows, paired by seed."""
    base = comparison.column(comparison.reference)
    others = [name for name in comparison.columns if name != base]
    rows = [
        [level, *(_difference(comparison, number, name, base) for name in others)]
        for number, level in enumerate(comparison.rows)
    ]
    note = f"The metric is {comparison.metric.quoted}; mean ± deviation of the differences, paired by seed."
    return Sheet(["tier", *others], [rows], left=1, title=f"Difference from {base}", note=note)


def _difference(comparison: Comparison, row: int, name: str, base: str) -> str:
    cell, from_this = (comparison.columns[column].get(row) for column in (name, base))
    if cell is None or from_this is None:
        return ""
    shown = spread_text(cell.minus(from_this), comparison.metric)
    return shown if shown.startswith("-") else f"+{shown}"


SPENT = (
    *("entry", "tier", "parameters", "MACs per sample", "bytes per round"),
    *("bytes per client", "MACs per client", "bytes in all", "MACs in all"),
)


def cost_sheet(entries: Sequence[EntryRuns]) -> Sheet:
    """Return the training costs by tier: of a client in a round and in the whole run, and of all clients together."""
    seeds = len(entries[0].runs)
    note = (
        "Bytes per round: one client's training, down and up. Per client: its training in all rounds, if it took part "
        "as often as the average client. In all: the tier's clients together"
        + (f"; mean over {seeds} seeds." if seeds > 1 else ".")
    )
    groups = [_cost_rows(entry) for entry in entries]
    return Sheet([*SPENT, entries[0].metric.name], groups, left=2, title="What each tier spent", note=note)


def _cost_rows(entry: EntryRuns) -> list[list[str]]:
    rows: list[list[str]] = []
    for tier in entry.tiers:
        cost, (client_bytes, client_macs) = entry.first.costs[tier], entry.budget(tier)
        sizes = (f"{cost.parameters:,}", format_macs(cost.macs), format_bytes(entry.client_bytes(tier)))
        of_client = (format_bytes(client_bytes), format_total_macs(client_macs))
        totals = (format_bytes(entry.bytes(tier)), format_total_macs(entry.macs(tier)))
        rows.append([entry.label, tier, *sizes, *of_client, *totals, _last_and_best(entry, tier)])
    if len(entry.tiers) > 1:
        totals = (format_bytes(entry.bytes()), format_total_macs(entry.macs()))
        rows.append([entry.label, "all", "", "", "", "", "", *totals, ""])
    return rows


def target_cost_sheet(metric: Metric, target: float, reached: Sequence[TargetCost]) -> Sheet:
    rows = [[r.entry.label, r.tier, _ratio(r.communication), _ratio(r.computation)] for r in reached]
    note = (
        "Communication and computation of all clients together, with models of all sizes, until the tier first reaches "
        "the target. They are relative to the full model on every client. They are not the cost of the tier alone."
    )
    title = f"Cost of {metric.goal(target)}"
    columns = ["entry", "until tier", "communication of all clients", "computation of all clients"]
    return Sheet(columns, [rows], left=2, title=title, note=note)


def target_time_sheet(metric: Metric, target: float, timed: Sequence[TargetTime]) -> Sheet:
    rows = [
        [
            *(t.entry.label, t.tier, "not reached" if t.to_target is None else f"{t.to_target:,.1f}"),
            *(f"{t.whole_run:,.1f}", f"{t.whole_run / len(t.entry.first.records):.3g}"),
            _last_and_best(t.entry, t.tier),
        ]
        for t in timed
    ]
    note = (
        "Simulated seconds of training on the clients' devices: until the tier first reaches the target, of the whole "
        "run, and of an average round. Evaluation takes no simulated time."
    )
    columns = ["entry", "tier", "s to target", "s in all", "s per round", metric.name]
    return Sheet(columns, [rows], left=2, title=f"Time to {metric.goal(target)}", note=note)


def comparison_csv(entries: Sequence[EntryRuns]) -> str:
    """Return plain numbers: a line for each entry, seed, evaluated round and tier."""
    metrics = [metric.name for metric in entries[0].first.config.objective.reported]
    timed = any(run.seconds_so_far() for entry in entries for run in entry.runs)
    rows: list[list[object]] = [[*CSV, *metrics, *(["simulated_seconds_so_far"] if timed else [])]]
    for entry in entries:
        for run in entry.runs:
            bytes_so_far, macs_so_far = cumulative(run, bytes_sent), cumulative(run, macs_computed)
            for record in run.evaluated:
                seconds = [next(iter(run.seconds_so_far()[record.round - 1 :]), "")] if timed else []
                spent = (bytes_so_far[record.round - 1], macs_so_far[record.round - 1])
                for tier, of_tier in record.metrics.items():
                    cost = run.costs[tier]
                    where = (entry.label, run.config.seed, record.round, tier)
                    values = [of_tier[name] for name in metrics]
                    rows.append([*where, cost.parameters, cost.macs, *spent, *values, *seconds])
    return csv_text(rows)


def _cell_text(comparison: Comparison, cell: TableCell | None, row: int) -> str:
    if cell is None:
        return ""
    size = format_parameters(cell.parameters) + (f" ×{cell.shares}" if cell.shares > 1 else "")
    return f"{size}: {_last_and_best(cell.entry, cell.tier, bold=cell is comparison.best(row))}"


def _last_and_best(entry: EntryRuns, tier: str, *, bold: bool = False) -> str:
    """Return the metric after the last round, and in brackets that of the best round; bold is the last one alone."""
    last, best = (spread_text(found, entry.metric) for found in (entry.final(tier), entry.best(tier)))
    return f"{f'**{last}**' if bold else last} (best {best})"


def _declared_note(comparison: Comparison) -> str:
    """Return which entries differ from the others outside [method], and in which settings."""
    labels: dict[str, list[str]] = {}
    for entry in (cell.entry for cells in comparison.columns.values() for cell in cells.values()):
        same = labels.setdefault(", ".join(map(str, entry.declared)), [])
        if entry.label not in same:
            same.append(entry.label)
    return "".join(f" Other settings of {', '.join(own)}: {text}." for text, own in labels.items() if text)


def _best_note(evaluated_on: str) -> str:
    return (
        f"Best: each run's best evaluated round, chosen for every tier on the {evaluated_on} samples themselves, "
        "which is optimistic; papers often report it."
    )


def spread_text(final: Spread, metric: Metric) -> str:
    """Return a mean and its deviation as tables show them: `93.46 ± 0.12`."""
    numbers = [final.mean] if final.deviation is None else [final.mean, final.deviation]
    return " ± ".join(f"{number:.{metric.decimals}f}" for number in numbers)


def _ratio(ratio: float | None) -> str:
    return "not reached" if ratio is None else f"{ratio:.3f}"
