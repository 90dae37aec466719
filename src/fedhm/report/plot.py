"""A plot, as data: the page draws it twice, to be looked at and to be played with, and has its numbers as a table."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from fedhm.report.sheets import Sheet

DASHES = ("solid", "dash", "dot", "dashdot")  # a style for each run, a colour for each tier
HEIGHT, LEGEND_ROW, MOST_LEGEND_ROWS = 420, 19, 16  # pixels, and rows
MOST_ROWS = 200  # of the table behind a plot, which would outweigh the page


@dataclass(frozen=True)
class Line:
    """What is drawn in one colour. Its `run` and `tier` are what the page's switches turn off."""

    label: str
    x: Sequence[float]  # of bars: numbers of categories
    y: Sequence[float]
    colour: str
    dash: int = 0
    kind: Literal["line", "points", "bars"] = "line"
    run: str = ""
    tier: str = ""
    around: Sequence[float] = ()  # half the height of a band around it
    hints: Sequence[str] = ()  # what stands under the pointer beside the values
    symbol: str = "circle"  # circle, x or circle-open


@dataclass(frozen=True)
class Plot:
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    summary: str  # for who cannot see it
    log_x: bool = False
    log_y: bool = False
    whole_x: bool = False  # rounds and clients are counted
    whole_y: bool = False
    categories: Sequence[str] = ()  # what stands below the axis in place of 0, 1, …
    decimals: int = 4
    together: bool = False  # values of all lines under one pointer: they share their x
    numbers: Sheet | None = None  # the table behind it, where that is no row for each place on the axis

    @property
    def height(self) -> int:
        """Return how high it is, in pixels, so that a long legend leaves room on a phone: there two short names fit."""
        longest = max((len(line.label) for line in self.lines), default=0)
        rows = len(self.lines) * (0.5 if longest < 16 else -(-longest // 36))
        return HEIGHT + LEGEND_ROW * max(0, min(MOST_LEGEND_ROWS, round(rows)) - 2)

    @property
    def heading(self) -> str:
        """Return its title with a capital, unless it begins with a sign such as ε."""
        return self.title[0].upper() + self.title[1:] if self.title[0].isascii() else self.title

    @property
    def key(self) -> str:
        """Return an identifier that stays the same while a run goes on."""
        plain = re.sub(r"[^a-z0-9]", "-", self.title.lower())
        exact = plain == self.title.lower().replace(" ", "-")
        return f"plot-{plain}" if exact else f"plot-{plain}-{crc32(self.title.encode()):x}"

    def sheet(self) -> Sheet:
        """Return the numbers: a row for each place on the axis, a column for each line; of long runs, not every row."""
        if self.numbers:
            return self.numbers
        places = sorted({place for line in self.lines for place in line.x})
        step = -(-len(places) // MOST_ROWS) or 1
        chosen = places[::-1][::step][::-1]  # the last one is what most readers want
        columns = [dict(zip(line.x, line.y, strict=True)) for line in self.lines]
        rows = [[self._place(place), *(self._shown(column.get(place)) for column in columns)] for place in chosen]
        note = f"Every {step}th row; report.csv has all of them." if step > 1 else ""
        return Sheet([self.x_label, *(line.label for line in self.lines)], [rows], left=1, note=note)

    def _place(self, place: float) -> str:
        if self.categories:
            return self.categories[int(place)]
        return f"{place:,.0f}" if self.whole_x else f"{place:,.4g}"

    def _shown(self, value: float | None) -> str:
        return "" if value is None else f"{value:,.{self.decimals}f}"


def ends(lines: Sequence[Line], decimals: int, most: int = 8) -> str:
    """Return where lines end, for a summary."""
    said = [f"{line.label}: {line.y[-1]:,.{decimals}f}" for line in lines if len(line.y)]
    return "; ".join(said[:most]) + (f"; and {len(said) - most} more" if len(said) > most else "")
