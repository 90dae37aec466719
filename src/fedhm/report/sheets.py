"""A table as data, `Sheet`, printed in a terminal or written as Markdown. The page shows it as HTML."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich.markup import escape
from rich.table import Table

BOLD = re.compile(r"\*\*(.*?)\*\*")


@dataclass(frozen=True)
class Sheet:
    """Columns, and groups of rows with a line between them. Cells are text, **bold** as in Markdown."""

    columns: Sequence[str]
    groups: Sequence[Sequence[Sequence[str]]]
    left: int  # the first columns name the row, the others are numbers
    title: str = ""
    note: str = ""  # what the columns leave out
    numbers: Sequence[str] = ()  # columns among the first that are numbers, too

    @property
    def rows(self) -> Iterable[Sequence[str]]:
        return (row for group in self.groups for row in group)

    def is_words(self, number: int) -> bool:
        """Tell whether a column holds words, which are aligned to the left."""
        return number < self.left and self.columns[number] not in self.numbers

    def without(self, column: str) -> "Sheet":
        number = self.columns.index(column)
        cut = [[[*row[:number], *row[number + 1 :]] for row in group] for group in self.groups]
        return replace(self, columns=[c for c in self.columns if c != column], groups=cut)

    def width(self, number: int) -> int:
        """Return the width of a column. Its heading may be broken between words, its cells may not."""
        words = self.columns[number].split()
        return max(len(_plain(text)) for text in (*words, *(row[number] for row in self.rows)))

    def split(self, width: int) -> list["Sheet"]:
        """Split the columns into parts that fit `width` characters. Each part begins with the names of the rows."""
        needed = [3 + self.width(number) for number in range(len(self.columns))]
        words = list(range(self.left))
        parts: list[list[int]] = [[]]
        for number in range(self.left, len(self.columns)):
            if parts[-1] and 1 + sum(needed[n] for n in (*words, *parts[-1], number)) > width:
                parts.append([])
            parts[-1].append(number)
        return [self._columns([*words, *part]) for part in parts]

    def _columns(self, numbers: Sequence[int]) -> "Sheet":
        groups = [[[row[n] for n in numbers] for row in group] for group in self.groups]
        return replace(self, columns=[self.columns[n] for n in numbers], groups=groups)


def rich_table(sheet: Sheet, *, spacious: bool = False) -> Table:
    """Return a table for a terminal. A spacious one has unbroken headings and its note below."""
    table = Table(title=escape(sheet.title) or None, title_justify="left", caption_justify="left")
    if spacious:
        table.caption = escape(sheet.note) or None
    for number, column in enumerate(sheet.columns):
        heading = column if spacious else "\n".join(textwrap.wrap(column, sheet.width(number)))
        table.add_column(escape(heading), justify="left" if sheet.is_words(number) else "right")
    for group in sheet.groups:
        for row in group:
            cells = (BOLD.sub(r"[bold]\1[/bold]", escape(cell)) for cell in row)
            table.add_row(*cells, end_section=row is group[-1])
    return table


def markdown_table(sheet: Sheet) -> str:
    lines = [f"### {sheet.title}", ""] if sheet.title else []
    marks = ["---" if sheet.is_words(number) else "--:" for number in range(len(sheet.columns))]
    lines += ["| " + " | ".join(sheet.columns) + " |", "|" + "|".join(marks) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in sheet.rows]
    return "\n".join([*lines, "", sheet.note, ""])


def _plain(cell: str) -> str:
    return BOLD.sub(r"\1", cell)
