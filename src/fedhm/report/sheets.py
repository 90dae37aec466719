"""A table as data, `Sheet`, printed in a terminal or written as Markdown or CSV. The page shows it as HTML.

Names of folders, devices and tiers, and the reasons of clients are text that others chose. So every text is escaped
here, where it becomes Markdown or CSV.
"""

import csv
import io
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

from rich.markup import escape
from rich.table import Table

from fedhm.machine.printable import printable

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


# Markdown


def markdown_table(sheet: Sheet) -> str:
    lines = [f"### {markdown_text(sheet.title)}", ""] if sheet.title else []
    marks = ["---" if sheet.is_words(number) else "--:" for number in range(len(sheet.columns))]
    lines += ["| " + " | ".join(map(_markdown_cell, sheet.columns)) + " |", "|" + "|".join(marks) + "|"]
    lines += ["| " + " | ".join(map(_markdown_cell, row)) + " |" for row in sheet.rows]
    return "\n".join([*lines, "", markdown_paragraph(sheet.note), ""])


_MARKUP = re.compile(
    r"[\\`*\[|~@$]"  # escapes, code, emphasis, links and images, cells, deleted text, mentions, formulas
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis; inside a word an underscore is none
    r"|(?<=:)/(?=/)|(?<=www)\.",  # addresses, which many renderers make links of
    re.IGNORECASE,
)
_BLOCK = re.compile(r"[-+=#]|\d+(?=[.)])")  # at the beginning of a line: lists, headings, lines below headings
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def markdown_text(text: str) -> str:
    """Return any text as one line of Markdown that shows it as it is, without markup, links, images or HTML."""
    return _escape(_one_line(text))


def markdown_paragraph(text: str) -> str:
    """Return any text as a paragraph of Markdown: it cannot begin a heading, a list or a quotation."""
    line = markdown_text(text)
    begins = _BLOCK.match(line)
    if begins is None:
        return line
    number = begins[0] if begins[0].isdecimal() else ""
    return f"{number}\\{line[len(number) :]}"


def markdown_code(text: str) -> str:
    """Return any text as code within a line of Markdown."""
    line = _one_line(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    padding = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{padding}{line}{padding}{fence}"


def markdown_picture(text: str, file_name: str) -> str:
    """Return a picture in the folder of the Markdown file."""
    return f"![{markdown_text(text)}]({quote(file_name)})"


def _markdown_cell(cell: str) -> str:
    parts = BOLD.split(_one_line(cell))  # every second part is bold
    return "".join(f"**{_escape(part)}**" if number % 2 else _escape(part) for number, part in enumerate(parts))


def _one_line(text: str) -> str:
    return printable(text, max(1, len(text)))


def _escape(line: str) -> str:
    escaped = _MARKUP.sub(r"\\\g<0>", line)
    return "".join(_HTML.get(letter, letter) for letter in escaped)


# CSV


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV that a spreadsheet can open: numbers stay numbers, and no text is a formula."""
    out = io.StringIO()
    csv.writer(out).writerows([_csv_cell(cell) for cell in row] for row in rows)
    return out.getvalue()


def sheet_csv(sheet: Sheet) -> str:
    """Return the cells of a table as CSV."""
    return csv_text([sheet.columns, *([_plain(cell) for cell in row] for row in sheet.rows)])


_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠\t\r]")  # spreadsheets take the wide characters of Chinese and Japanese, too
_NUMBER = re.compile(r"[-+]?(\d[\d,]*)?\.?\d+(e[-+]?\d+)?", re.IGNORECASE)


def _csv_cell(cell: object) -> object:
    if not isinstance(cell, str) or _NUMBER.fullmatch(cell) or not _FORMULA.match(cell):
        return cell
    return f"'{cell}"


def _plain(cell: str) -> str:
    return BOLD.sub(r"\1", cell)
