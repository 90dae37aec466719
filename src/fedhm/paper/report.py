"""Reports on tables and figures that need runs: our numbers beside the paper's, and the figures in the paper's form."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path

from rich.console import Console

from fedhm.compare.plots import measure_bars, method_line, method_plot
from fedhm.compare.results import (
    EntryRuns,
    Spread,
    TargetCost,
    bytes_sent,
    common_target,
    costs_to_reach,
    cumulative,
    full_model,
)
from fedhm.compare.tables import TableCell, comparison_csv, spread_text
from fedhm.config.objective import Metric
from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.paper.artifacts import KERNEL, RANK_IS_KERNEL, Artifact, Column
from fedhm.paper.numbers import (
    DATA_TITLES,
    FIGURE_4,
    PARTITION_TITLES,
    SIZES,
    DataName,
    PaperSize,
    PartitionName,
)
from fedhm.paper.scale import ScaleName
from fedhm.report.format import MISSING, format_parameters
from fedhm.report.page import render_page
from fedhm.report.palette import category_look, tier_palette
from fedhm.report.plot import Line, Plot, last_values, save_png
from fedhm.report.sections import Part, Section
from fedhm.report.sheets import (
    Sheet,
    csv_text,
    markdown_code,
    markdown_picture,
    markdown_table,
    markdown_text,
    rich_table,
    sheet_csv,
)

ONLY_ORDER = (
    "This is the small scale: the networks are narrower and the rounds fewer than the paper's. So only the order of "
    "the methods can be compared, and not their numbers."
)


@dataclass(frozen=True)
class PaperReport:
    """A table or figure of the paper as it came out here."""

    stem: str  # of its files
    title: str
    command: str
    sheets: Sequence[Sheet]
    plots: Sequence[Plot] = ()
    numbers: str = ""  # the content of the CSV file; empty: the cells of all sheets

    def show(self, console: Console) -> None:
        console.print(self.title, style="bold", highlight=False, markup=False)
        for sheet in self.sheets:
            for part in sheet.split(console.width):
                console.print(rich_table(part))
            console.print(sheet.note + "\n", highlight=False, markup=False)

    def save(self, out: Path) -> list[Path]:
        """Write tables, numbers, the picture and the page, and return their paths."""
        files = {kind: out / f"{self.stem}.{kind}" for kind in ("md", "csv", "html", "png")}
        picture = f"\n{markdown_picture(self.title, files['png'].name)}\n" if self.plots else ""
        tables = "\n".join(markdown_table(sheet) for sheet in self.sheets)
        head = f"# {markdown_text(self.title)}\n\n{markdown_code(self.command)}"
        write_atomically(files["md"], f"{head}\n\n{tables}{picture}")
        write_atomically(files["csv"], self.numbers or "\n".join(map(sheet_csv, self.sheets)))
        write_atomically(files["html"], render_page(self.title, self._sections, []))
        if not self.plots:
            return [files[kind] for kind in ("md", "csv", "html")]
        save_png(self.plots, files["png"], side_by_side=len(self.plots) > 1)
        return list(files.values())

    @property
    def _sections(self) -> list[Section]:
        parts: list[Part] = [*self.sheets]
        made_by: list[Part] = [f"Made by: {self.command}"]
        sections = [Section("Table", parts), Section("Figure", [*self.plots]), Section("Command", made_by)]
        return [section for section in sections if section.parts]


@dataclass(frozen=True)
class ColumnRuns:
    """A column, and the finished runs of its entries, in order; None for an entry that is not finished."""

    column: Column
    entries: Sequence[EntryRuns | None]


@dataclass(frozen=True)
class Row:
    """A model of a column: ours, and the paper's."""

    column: Column
    level: int  # in the column, from its smallest model on
    cell: TableCell
    size: PaperSize | None  # None: the paper does not have it
    published: float | None

    @property
    def metric(self) -> Metric:
        return self.cell.entry.metric

    @property
    def best(self) -> Spread:
        return self.cell.entry.best(self.cell.tier)

    @property
    def difference(self) -> float | None:
        return None if self.published is None else self.best.mean - self.published

    @property
    def tier(self) -> str:
        return f"rank {KERNEL}" if self.column is RANK_IS_KERNEL else self.cell.tier

    @property
    def levels(self) -> int:
        return self.size.levels if self.size else self.cell.shares


@dataclass(frozen=True)
class RunsReport:
    """What a report on runs is made of."""

    artifact: Artifact
    data: DataName
    partition: PartitionName
    scale: ScaleName
    columns: Sequence[ColumnRuns]
    stem: str
    command: str
    given_target: float | None = None

    @cached_property
    def rows(self) -> list[Row]:
        return [row for column in self.columns for row in self._rows(column)]

    def _rows(self, of: ColumnRuns) -> Iterator[Row]:
        """Yield the models of a column. A column with one entry has its tiers, others one model for each entry."""
        known = [entry for entry in of.entries if entry is not None]
        if len(of.entries) == 1:
            cells = [(i, TableCell(e, t, e.levels.count(t))) for e in known for i, t in enumerate(e.tiers)]
            count = len(cells)
        else:
            cells = [(i, TableCell(e, e.tiers[0], 1)) for i, e in enumerate(of.entries) if e is not None]
            count = len(of.entries)
        table = self.artifact.paper or {}
        published = table.get((self.data, self.partition), {}).get(of.column.key, ())
        sizes = SIZES[self.data].get(of.column.key, ())
        fits = len(published) == len(sizes) == count  # other tiers than the paper's have no numbers beside them
        for place, cell in cells:
            size, accuracy = (sizes[place], published[place]) if fits else (None, None)
            yield Row(of.column, count - 1 - place, cell, size, accuracy)

    @property
    def entries(self) -> list[EntryRuns]:
        """Return all finished entries, each once."""
        found = {entry.label: entry for column in self.columns for entry in column.entries if entry is not None}
        return list(found.values())

    @property
    def metric(self) -> Metric:
        return self.entries[0].metric

    @property
    def evaluated_on(self) -> str:
        return self.entries[0].first.config.evaluated_on

    @property
    def title(self) -> str:
        where = f"{DATA_TITLES[self.data]}, {PARTITION_TITLES[self.partition]}"
        small = ", small scale" if self.scale == "small" else ""
        return f"{self.artifact.title} ({where}{small})"

    def report(self) -> PaperReport:
        """Return the report by the kind of table or figure."""
        kinds = {
            "accuracy": self._accuracy,
            "convergence": self._convergence,
            "communication": self._communication,
            "target": self._target,
            "size": self._size,
        }
        return kinds[self.artifact.kind]()

    def _report(self, sheets: Sequence[Sheet], plots: Sequence[Plot], numbers: str = "") -> PaperReport:
        return PaperReport(self.stem, self.title, self.command, sheets, plots, numbers)

    # Tables 2, 3, 7 and 8: accuracy by method and size

    def _accuracy(self) -> PaperReport:
        plots = [self._size_plot(ours=True), self._size_plot(ours=False)]
        return self._report([self.accuracy_sheet()], [plot for plot in plots if plot.lines], self._accuracy_csv())

    def accuracy_sheet(self) -> Sheet:
        """Return a row for each model: the paper's number, our best round, the difference, our last round."""
        columns = ["method", "tier", "parameters", "paper's parameters", "paper", "best", "difference", "last"]
        groups: dict[str, list[list[str]]] = {}
        for row in self.rows:
            groups.setdefault(row.column.key, []).append(self._cells(row))
        return Sheet(columns, list(groups.values()), left=2, note=" ".join(self._notes()))

    def _cells(self, row: Row) -> list[str]:
        times = f" ×{row.levels}" if row.levels > 1 else ""
        return [
            *(row.column.title, row.tier, format_parameters(row.cell.parameters) + times),
            f"{format_parameters(1e6 * row.size.millions)}{times}" if row.size else MISSING,
            MISSING if row.published is None else f"{row.published:.2f}",
            spread_text(row.best, row.metric),
            MISSING if row.difference is None else f"{row.difference:+.2f}",
            spread_text(row.cell.final, row.metric),
        ]

    def _notes(self) -> Iterator[str]:
        config, seeds = self.entries[0].first.config, len(self.entries[0].runs)
        every = config.evaluation.every
        over = f" Ours are means ± deviations over {seeds} seeds." if seeds > 1 else ""
        yield (
            f"{self.evaluated_on.capitalize()} {self.metric.quoted}. The paper's numbers are those of the best test "
            "round. best: our best evaluated round"
            + (f" (every {every} rounds are evaluated)" if every > 1 else " (every round is evaluated)")
            + f". difference: best minus paper. last: after the last of {config.train.rounds} rounds.{over} "
            "×n: n of the four capability levels train this model."
        )
        if self.scale == "small":
            yield ONLY_ORDER
        same, pairs = self.order_agreement()
        if pairs:
            yield (
                f"Order: of {pairs} pairs of methods at the same level, the smallest model with the smallest and so "
                f"on, {same} have the paper's order."
            )

    def order_agreement(self) -> tuple[int, int]:
        """Return how many pairs of models at the same level are ordered as in the paper, and how many there are.

        Pairs that are equal in the paper do not count.
        """
        known = [row for row in self.rows if row.published is not None]
        pairs = [
            (a.published - b.published, a.best.mean - b.best.mean)
            for a, b in combinations(known, 2)
            if a.level == b.level and a.published is not None and b.published is not None
        ]
        pairs = [(theirs, ours) for theirs, ours in pairs if theirs]
        return sum(theirs * ours > 0 for theirs, ours in pairs), len(pairs)

    def _accuracy_csv(self) -> str:
        values = ("paper", "best", "best_deviation", "difference", "last", "last_deviation")
        names = ("column", "entry", "tier", "parameters", "paper_parameters_in_millions", *values, "seeds")
        lines: list[Sequence[object]] = [names]
        for row in self.rows:
            best, last, seeds = row.best, row.cell.final, len(row.cell.entry.runs)
            millions = row.size.millions if row.size else None
            where = (row.column.key, row.cell.entry.label, row.tier, row.cell.parameters, millions)
            found = (row.published, best.mean, best.deviation, row.difference, last.mean, last.deviation)
            lines.append([*where, *found, seeds])
        return csv_text(lines)

    # Figure 8, and the plots of the tables: accuracy by size

    def _size(self) -> PaperReport:
        full = full_model(self.entries)
        relative = full.first.costs[full.tiers[0]].parameters if full else None
        plots = [self._size_plot(ours=True, relative_to=relative)]
        if relative:
            largest = max(size.millions for size in SIZES[self.data]["lowrank"])
            plots.append(self._size_plot(ours=False, relative_to=largest * 1e6))
        sheet = self.accuracy_sheet()
        note = (
            f"rank {KERNEL}: every convolution has the rank k of its k × k kernel, and only 1×1 shortcuts stay "
            "dense. The paper prints no number for this model, and says that it has about 2 % of the parameters and "
            "falls below 80 % on CIFAR-10 and below 55 % on CIFAR-100."
        )
        sheets = [Sheet(sheet.columns, sheet.groups, sheet.left, note=f"{sheet.note} {note}")]
        return self._report(sheets, [plot for plot in plots if plot.lines], self._accuracy_csv())

    def _size_plot(self, *, ours: bool, relative_to: float | None = None) -> Plot:
        """Return the accuracy of every column's models by their size, ours or the paper's."""
        lines: list[Line] = []
        for number, column in enumerate(self.columns):
            rows = [row for row in self.rows if row.column is column.column]
            points = [_point(row, ours=ours) for row in rows]
            known = [point for point in points if point is not None]
            if not known:
                continue
            x, y = ([point[axis] for point in known] for axis in (0, 1))
            x = [100 * size / relative_to for size in x] if relative_to else x
            name, (colour, dash) = column.column.title, category_look(number)
            if len(known) > 1:
                lines.append(Line(name, x, y, colour, dash, run=name, in_legend=False))
            lines.append(Line(name, x, y, colour, kind="points", run=name))
        whose = "ours" if ours else "the paper's"
        measured = "best " if ours else "published "
        return Plot(
            title=f"{self.metric.name} by size, {whose}",
            x_label="parameters, in percent of the full model" if relative_to else "parameters",
            y_label=f"{measured}{self.metric.axis(self.evaluated_on)}",
            lines=lines,
            summary=f"A line for each method, {whose}, from its smallest to its largest model. The smallest reach: "
            f"{last_values([line for line in lines if line.in_legend], 2)}.",
            log_x=True,
            x_unit=None if relative_to else "",
            decimals=2,
        )

    # Figure 2: convergence of the smallest model

    def _convergence(self) -> PaperReport:
        lines = [
            method_line(number, row.column.title, row.cell, [place for place, _ in row.cell.curve])
            for number, row in self._smallest()
        ]
        plot = self._line_plot("accuracy of each method's smallest model by round", "round", lines)
        sheet = self._curve_sheet([(row.column.title, row) for _, row in self._smallest()])
        return self._report([sheet], [plot], comparison_csv(self.entries))

    def _smallest(self) -> list[tuple[int, Row]]:
        """Return the smallest model of every column that has one, with the number of its column."""
        last = {row.column.key: row for row in self.rows}
        return [(n, last[c.column.key]) for n, c in enumerate(self.columns) if c.column.key in last]

    def _curve_sheet(self, models: Sequence[tuple[str, Row]]) -> Sheet:
        """Return the round in which each model first comes within a point of its best, and its best and last round."""
        cells = [
            [
                *(name, row.tier, format_parameters(row.cell.parameters)),
                _nearly_there(row),
                spread_text(row.best, row.metric),
                spread_text(row.cell.final, row.metric),
            ]
            for name, row in models
        ]
        note = f"Nearly there: the first evaluated round within one point of the best. {self._figure_note}"
        columns = ["model", "tier", "parameters", "nearly there in round", "best", "last"]
        return Sheet(columns, [cells], left=2, note=note)

    @property
    def _figure_note(self) -> str:
        small = f" {ONLY_ORDER}" if self.scale == "small" else ""
        return f"The paper shows this as a picture, without numbers.{small}"

    def _line_plot(self, title: str, x_label: str, lines: Sequence[Line], unit: str | None = None) -> Plot:
        return method_plot(title, x_label, lines, self.metric, self.evaluated_on, unit)

    # Figure 3: accuracy by communication

    def _communication(self) -> PaperReport:
        sent = partial(cumulative, cost=bytes_sent)
        lines = [
            replace(method_line(0, _rank_name(row), row.cell, row.cell.spent_so_far(sent)), colour=colour)
            for row, colour in zip(self.rows, tier_palette(len(self.rows)), strict=True)
        ]
        label = "sent and received by all clients"
        plot = self._line_plot("accuracy by communication, one model for all clients", label, lines, "B")
        return self._report(
            [self._curve_sheet([(_rank_name(row), row) for row in self.rows])], [plot], comparison_csv(self.entries)
        )

    # Figure 4: costs until a target

    def _target(self) -> PaperReport:
        full = full_model(self.entries)
        if full is None:
            raise FedhmError("figure4 is relative to the full model, whose run is not finished")
        target = common_target(self.entries) if self.given_target is None else self.given_target
        costs = [cost for cost in costs_to_reach(target, self.entries, full) if cost.entry is not full]
        paper = FIGURE_4[self.data, self.partition]
        ours = [[f"γ = {c.tier}", _times(c.communication), _times(c.computation)] for c in costs]
        theirs = [["the paper", f"{paper.communication:.1f}×", f"{paper.computation:.1f}×"]]
        chosen = "the largest whole percent that all models reach" if self.given_target is None else "as asked"
        note = (
            f"How many times less than the full model the low-rank model sends and computes until it first reaches "
            f"{self.metric.goal(target)} ({chosen}). The paper does not state all of its targets."
        )
        if self.data == "cifar100":
            note += " Its savings here come from γ = 1/12, which is not among its tiers."
        if self.scale == "small":
            note += f" {ONLY_ORDER}"
        sheet = Sheet(["model", "communication", "computation"], [ours, theirs], left=1, note=note)
        return self._report([sheet], [self._savings_plot(target, costs)])

    def _savings_plot(self, target: float, costs: Sequence[TargetCost]) -> Plot:
        paper = FIGURE_4[self.data, self.partition]
        amounts = {
            "communication": [*(_saving(cost.communication) for cost in costs), paper.communication],
            "computation": [*(_saving(cost.computation) for cost in costs), paper.computation],
        }
        names = [*(f"γ = {cost.tier}" for cost in costs), "the paper"]
        return Plot(
            title=f"savings until {self.metric.goal(target)}, one model for all clients",
            x_label="model",
            y_label="times less than the full model",
            lines=measure_bars(amounts),
            summary="How many times less all clients together send and compute with each low-rank model than with the "
            "full model, until it reaches the target.",
            categories=names,
            horizontal=True,
            reference=1.0,
            missing="not reached",
            decimals=2,
        )


def _point(row: Row, *, ours: bool) -> tuple[float, float] | None:
    """Return parameters and accuracy, ours or the paper's."""
    if ours:
        return row.cell.parameters, row.best.mean
    return None if row.size is None or row.published is None else (row.size.millions * 1e6, row.published)


def _nearly_there(row: Row) -> str:
    """Return the first evaluated round whose mean over the seeds is within one point of the best such mean."""
    curve = row.cell.curve
    best = row.metric.best(spread.mean for _, spread in curve)
    return next((str(number) for number, spread in curve if spread.mean >= best - 1), MISSING)


def _rank_name(row: Row) -> str:
    return "full model" if row.cell.entry.first.config.method.is_full_model else f"γ = {row.cell.tier}"


def _saving(ratio: float | None) -> float:
    return 1 / ratio if ratio else math.nan


def _times(ratio: float | None) -> str:
    return f"{_saving(ratio):.1f}×" if ratio else "not reached"


def print_paths(paths: Iterable[Path], console: Console) -> None:
    for path in paths:
        console.print(str(path), highlight=False, soft_wrap=True, markup=False)
