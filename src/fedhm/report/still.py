"""Plots as pictures in SVG by matplotlib, for pages without scripts, and on paper."""

import io
import math
import re
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from fedhm.report.figures.plots import plain
from fedhm.report.plot import DASHES, HEIGHT, Line, Plot

INK = "#010203"  # stands for the page's own colour of text, which a file cannot know
STYLES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
MARKERS = {"circle": "o", "x": "x", "circle-open": "o"}
WIDTH, LEGEND_ROW = 7.2, 0.2  # inches
COLUMNS, MOST_IN_LEGEND = 4, 40
ROOM, LONGEST = 90, 18  # characters that fit below the axis side by side, and of one name there
SIGN = 6  # characters that a line in the legend takes


def picture(plot: Plot) -> str:
    """Return a plot as an SVG element whose text and axes have the colour of the text around it."""
    inked = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    look: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": plot.key, "font.size": 9, **inked}
    with rc_context(look):
        # margins of fixed sizes: matplotlib's layout engines draw everything twice to find them
        legend = LEGEND_ROW * -(-len(plot.lines) // _columns(plot)) if _has_legend(plot) else 0.0
        below = legend + (1.3 if _is_turned(plot) else 0.5)
        height = HEIGHT / 96 + legend
        drawn = Figure(figsize=(WIDTH, height))
        axes = drawn.add_axes((0.8 / WIDTH, below / height, 1 - 1.0 / WIDTH, 1 - (below + 0.1) / height))
        bars = [line for line in plot.lines if line.kind == "bars"]
        for line in plot.lines:
            _draw(axes, line, len(bars), bars.index(line) if line in bars else 0)
        _finish(axes, plot)
        out = io.StringIO()
        drawn.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return _within_a_page(out.getvalue(), plot)


def _draw(axes: Axes, line: Line, bars: int, number: int) -> None:
    if line.kind == "bars":
        width = 0.8 / bars
        places = [x + (number + 0.5) * width - 0.4 for x in line.x]
        axes.bar(places, line.y, width, color=line.colour, label=plain(line.label))
        return
    points = line.kind == "points"
    axes.plot(
        line.x,
        line.y,
        linestyle="none" if points else STYLES[DASHES[line.dash % len(DASHES)]],
        marker=MARKERS[line.symbol] if points else "o" if len(line.x) < 3 else None,
        markerfacecolor="none" if line.symbol == "circle-open" else line.colour,
        markersize=4,
        color=line.colour,
        linewidth=1.6,
        label=plain(line.label),
    )
    if any(line.around):
        above = [y + d for y, d in zip(line.y, line.around, strict=True)]
        below = [y - d for y, d in zip(line.y, line.around, strict=True)]
        axes.fill_between(line.x, below, above, color=line.colour, alpha=0.15, linewidth=0)


def _finish(axes: Axes, plot: Plot) -> None:
    if plot.log_x:
        if around := _decade([x for line in plot.lines for x in line.x]):
            axes.set_xlim(around)
        axes.set_xscale("log")
        _logarithmic(axes.xaxis, axes.get_xlim())
    if plot.log_y:
        if around := _decade([y for line in plot.lines for y in line.y]):
            axes.set_ylim(around)
        axes.set_yscale("log")
        _logarithmic(axes.yaxis, axes.get_ylim())
    for axis in [axes.xaxis] * plot.whole_x + [axes.yaxis] * plot.whole_y:
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if plot.categories:
        turned = _is_turned(plot)
        names = [plain(name[-LONGEST:]) for name in plot.categories]
        axes.set_xticks(range(len(names)), names, rotation=60 if turned else 0, ha="right" if turned else "center")
    axes.set_xlabel(plain(plot.x_label))
    axes.set_ylabel(plain(plot.y_label))
    axes.grid(alpha=0.25, color=INK, linewidth=0.5)
    axes.set_axisbelow(True)
    if _has_legend(plot):
        axes.figure.legend(loc="lower left", ncols=_columns(plot), fontsize=8, frameon=False, borderaxespad=0.1)


def _decade(values: list[float]) -> tuple[float, float] | None:
    """Return limits around values that are all one, some of which matplotlib rounds to no range at all."""
    if not values or min(values) <= 0 or not math.isclose(min(values), max(values)):
        return None
    return min(values) / math.sqrt(10), max(values) * math.sqrt(10)


def _logarithmic(axis: Axis, limits: tuple[float, float]) -> None:
    """Give an axis numbers that can be read, also where there is no power of ten on it."""
    decades = math.log10(limits[1] / limits[0])
    if decades < 0.8:
        axis.set_major_locator(MaxNLocator(4))
    elif decades < 3:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _has_legend(plot: Plot) -> bool:
    return 1 < len(plot.lines) <= MOST_IN_LEGEND


def _columns(plot: Plot) -> int:
    """Return how many names of the legend fit side by side."""
    return max(1, min(COLUMNS, int(1.2 * ROOM) // (SIGN + max(len(line.label) for line in plot.lines))))


def _is_turned(plot: Plot) -> bool:
    return sum(map(len, plot.categories)) > ROOM


def _within_a_page(svg: str, plot: Plot) -> str:
    element = svg[svg.index("<svg") :].replace(INK, "currentColor")
    element = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", element, flags=re.DOTALL)  # styles would be the page's
    # ids are of the whole page: those that matplotlib numbers from 1 on in each picture would be there many times
    element = re.sub(r'id="[A-Za-z][\w.]*_\d+"', "", element)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'class="{plot.key}"', element, count=1)
