"""A plot is data, and three renderers show it: plotly in a browser, matplotlib in pictures, a table of its numbers.

Run reports, comparisons and export cards all make `Plot` values. A PNG file and the plot of the same name on the page
show the same value. matplotlib takes a second to import, so only the functions that draw with it do so.
"""

import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

from fedhm.machine.files import write_atomically
from fedhm.report.format import AxisScale, axis_scale, format_si
from fedhm.report.palette import DARK_TWINS, MEASURE, NEUTRAL, css_variable
from fedhm.report.sheets import Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Symbol = Literal["circle", "x", "circle-open", "square", "diamond"]
SYMBOLS: tuple[Symbol, ...] = ("circle", "square", "diamond", "x", "circle-open")
LARGE_SYMBOLS = ("x", "circle-open")  # which can then be seen on top of a circle
DASHES = ("solid", "dash", "dot", "dashdot")  # plotly's names
FEW_POINTS = 12  # a line with no more of them has a mark on each
HEIGHT, LEGEND_ROW, MAX_LEGEND_ROWS = 420, 19, 16  # of the page: pixels, pixels, rows
MAX_TABLE_ROWS = 200  # a longer table would outweigh the page


@dataclass(frozen=True)
class Line:
    """Values in one colour: a line, points or bars. The page's switches hide it by its `run` and `tier`."""

    label: str
    x: Sequence[float]  # for bars: indices of the plot's categories
    y: Sequence[float]  # NaN leaves a gap
    colour: str
    dash: int = 0  # an index of DASHES
    kind: Literal["line", "points", "bars"] = "line"
    run: str = ""
    tier: str = ""
    band: Sequence[float] = ()  # half the height of a band around the line, for each value
    hints: Sequence[str] = ()  # shown under the pointer beside each value
    symbol: Symbol = "circle"
    hatched: bool = False  # bars
    detail: str = ""  # follows the label in the legends of pictures
    in_legend: bool = True

    @property
    def full_label(self) -> str:
        return f"{self.label}, {self.detail}" if self.detail else self.label

    @property
    def has_marks(self) -> bool:
        """Tell whether each value has a mark. The ends of a broken line, such as a median's, are no values."""
        return len(self.x) <= FEW_POINTS and not any(map(math.isnan, self.x))


@dataclass(frozen=True)
class Plot:
    """Lines, points or bars on two axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    summary: str  # for readers who cannot see the plot
    log_x: bool = False
    log_y: bool = False
    whole_x: bool = False  # rounds and clients are counted
    whole_y: bool = False
    x_unit: str | None = None  # such as B: the axis is labelled with it and an SI prefix, and its numbers are in MB
    y_unit: str | None = None
    y_includes: Sequence[float] = ()  # values that the axis reaches in any case
    categories: Sequence[str] = ()  # names below the axis in place of 0, 1, …; they may have several lines
    horizontal: bool = False  # bars go to the right, which leaves room for long names
    reference: float | None = None  # a dotted line across all bars
    missing: str = ""  # stands for NaN in tables and beside bars
    decimals: int = 4
    significant: int = 0  # digits of values that differ by orders of magnitude, in place of decimals; 0: decimals
    shared_pointer: bool = False  # the pointer shows the values of all lines, which share their x
    legend_title: str = ""
    legend_below: bool = False  # pictures: long names would cover the lines
    run_labels: Mapping[str, str] = field(default_factory=dict)  # if given, pictures explain runs and tiers apart
    table: Sheet | None = None  # in place of a row for each place on the axis

    @property
    def height(self) -> int:
        """Return the height on the page in pixels. A long legend gets more: on a phone, two short names fit a row."""
        longest = max((len(line.label) for line in self.lines), default=0)
        rows = len(self.lines) * (0.5 if longest < 16 else -(-longest // 36))
        return HEIGHT + LEGEND_ROW * max(0, min(MAX_LEGEND_ROWS, round(rows)) - 2)

    @property
    def heading(self) -> str:
        """Return the title with a capital, unless it begins with a sign such as ε."""
        return self.title[0].upper() + self.title[1:] if self.title[0].isascii() else self.title

    @property
    def key(self) -> str:
        """Return an identifier that stays the same while a run goes on."""
        plain = re.sub(r"[^a-z0-9]", "-", self.title.lower())
        exact = plain == self.title.lower().replace(" ", "-")
        return f"plot-{plain}" if exact else f"plot-{plain}-{crc32(self.title.encode()):x}"

    @property
    def x_values(self) -> list[float]:
        return [x for line in self.lines for x in line.x]

    @property
    def y_values(self) -> list[float]:
        return [y for line in self.lines for y in line.y]


def in_axis_units(plot: Plot) -> Plot:
    """Return the plot with numbers in the units that its axes are labelled with: `sent (MB)`, and 12 for 12,000,000."""
    if plot.x_unit is not None:
        scale = axis_scale(plot.x_values, plot.x_unit)
        lines = [replace(line, x=[x / scale.size for x in line.x]) for line in plot.lines]
        plot = replace(plot, lines=lines, x_label=_with_name(plot.x_label, scale), x_unit=scale.name)
    if plot.y_unit is not None:
        scale = axis_scale(plot.y_values, plot.y_unit)
        lines = [
            replace(line, y=[y / scale.size for y in line.y], band=[d / scale.size for d in line.band])
            for line in plot.lines
        ]
        plot = replace(plot, lines=lines, y_label=_with_name(plot.y_label, scale), y_unit=scale.name)
    return plot


def _with_name(label: str, scale: AxisScale) -> str:
    return f"{label} ({scale.name})" if scale.name else label


def bar_limits(plot: Plot) -> tuple[float, float, bool]:
    """Return the ends of the axis of horizontal bars, with room for a number beside each, and if it is logarithmic."""
    reference = [plot.reference] if plot.reference is not None else []
    lengths = [*reference, *(y for y in plot.y_values if y > 0)] or [1.0]
    if max(lengths) > 5:  # one long bar would leave slivers of the others
        return 0.7 * min(lengths), 3 * max(lengths), True
    return 0.0, 1.2 * max(lengths), False


def last_values(lines: Sequence[Line], decimals: int, most: int = 8, *, significant: int = 0) -> str:
    """Return the last value of each line, for a summary."""
    format_spec = _format_spec(decimals, significant)
    values = [f"{line.label}: {line.y[-1]:{format_spec}}" for line in lines if len(line.y)]
    return "; ".join(values[:most]) + (f"; and {len(values) - most} more" if len(values) > most else "")


def _format_spec(decimals: int, significant: int) -> str:
    return f".{significant}g" if significant else f",.{decimals}f"


# The table of a plot's numbers.


def render_table(plot: Plot) -> Sheet:
    """Return a row for each place on the axis and a column for each line. Long runs have only some of their rows."""
    if plot.table:
        return plot.table
    places = sorted({place for line in plot.lines for place in line.x})
    step = -(-len(places) // MAX_TABLE_ROWS) or 1
    kept = places[::-1][::step][::-1]  # the last row is the one that most readers want
    columns = [dict(zip(line.x, line.y, strict=True)) for line in plot.lines]
    rows = [[_place_text(plot, place), *(_value_text(plot, each.get(place)) for each in columns)] for place in kept]
    note = f"Every {step}th row; report.csv has all of them." if step > 1 else ""
    return Sheet([plot.x_label, *(line.label for line in plot.lines)], [rows], left=1, note=note)


def _place_text(plot: Plot, place: float) -> str:
    if plot.categories:
        return plot.categories[int(place)].replace("\n", ", ")
    if plot.x_unit is not None:
        return format_si(place, plot.x_unit)
    return f"{place:,.0f}" if plot.whole_x else f"{place:,.4g}"


def _value_text(plot: Plot, value: float | None) -> str:
    if value is None:
        return ""
    return (
        plot.missing
        if math.isnan(value) and plot.missing
        else f"{value:{_format_spec(plot.decimals, plot.significant)}}"
    )


# plotly, for browsers.

FEW = 12  # so many rounds or clients each have their number beside the axis
CLEAR = "rgba(0,0,0,0)"  # the page's own colours show through, light or dark
HATCH = "rgba(90,90,90,1)"


def render_plotly(plot: Plot) -> dict[str, Any]:
    """Return data and layout as JSON for `Plotly.react`."""
    plot = in_axis_units(plot)
    traces = [trace for line in plot.lines for trace in (*_band_trace(line), _trace(plot, line))]
    return {"data": traces, "layout": _layout(plot), "height": plot.height}


def _trace(plot: Plot, line: Line) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "name": _wrapped(line.label),
        "x": [_wrapped_name(plot.categories[int(x)]) for x in line.x] if line.kind == "bars" else _json_numbers(line.x),
        "y": _json_numbers(line.y),
        "meta": {"run": line.run, "tier": line.tier},
        "hovertemplate": _hover_template(plot, line),
    }
    if line.hints:
        trace["customdata"] = [escape(hint) for hint in line.hints]
    if not line.in_legend:
        trace["showlegend"] = False
    if line.kind == "bars":
        return trace | _bars_look(plot, line, trace)
    mode = "markers" if line.kind == "points" else "lines+markers" if line.has_marks else "lines"
    look = {"color": line.colour, "dash": DASHES[line.dash % len(DASHES)], "width": 2}
    size = 11 if line.symbol in LARGE_SYMBOLS else 7 if line.kind == "points" else 5
    marker = {"color": line.colour, "symbol": line.symbol, "size": size}
    return trace | {"type": "scatter", "mode": mode, "line": look, "marker": marker}


def _bars_look(plot: Plot, line: Line, trace: Mapping[str, Any]) -> dict[str, Any]:
    hatch = {"shape": "/", "size": 6, "solidity": 0.25, "fillmode": "overlay", "fgcolor": HATCH}
    pattern = hatch if line.hatched else {"shape": ""}
    look: dict[str, Any] = {"type": "bar", "marker": {"color": line.colour, "pattern": pattern}}
    if not plot.horizontal:
        return look
    values = ["" if math.isnan(y) else f"{y:.2f}" for y in line.y]
    turned = {"orientation": "h", "x": trace["y"], "y": trace["x"]}
    return look | turned | {"text": values, "textposition": "outside", "cliponaxis": False}


def _band_trace(line: Line) -> list[dict[str, Any]]:
    """Return the band around a line, if it has one: along its top and back along its bottom."""
    if not any(line.band):
        return []
    above = [y + d for y, d in zip(line.y, line.band, strict=True)]
    below = [y - d for y, d in zip(line.y, line.band, strict=True)]
    return [
        {
            "type": "scatter",
            "x": _json_numbers([*line.x, *reversed(line.x)]),
            "y": _json_numbers([*above, *reversed(below)]),
            "meta": {"run": line.run, "tier": line.tier},
            "fill": "toself",
            "fillcolor": line.colour,
            "opacity": 0.15,
            "line": {"width": 0},
            "mode": "lines",
            "hoverinfo": "skip",
            "modebar": {"bgcolor": CLEAR},
            "showlegend": False,
        }
    ]


def _hover_template(plot: Plot, line: Line) -> str:
    spec = _format_spec(plot.decimals, plot.significant) if plot.y_unit is None else ",.4~g"
    value = f"%{{{'x' if plot.horizontal else 'y'}:{spec}}}" + (f" {plot.y_unit}" if plot.y_unit else "")
    hint = " %{customdata}" if line.hints else ""
    if plot.shared_pointer:
        return f"{value}{hint}"
    if plot.x_unit is not None:
        place = f"%{{x:,.4~g}} {plot.x_unit}"
    else:
        place = "%{x}" if plot.categories or plot.whole_x else "%{x:,.4g}"
    place = "%{y}" if plot.horizontal else place
    return f"{value} at {place}{hint}<extra>%{{fullData.name}}</extra>"


def _layout(plot: Plot) -> dict[str, Any]:
    gap = {"ticks": "outside", "ticklen": 5, "tickcolor": CLEAR}  # so that the numbers of both axes do not overlap
    across: dict[str, Any] = {
        "title": {"text": _wrapped(plot.x_label, 40)},
        "automargin": True,
        "zeroline": False,
        **gap,
    }
    if plot.log_x:
        across |= _plotly_log_axis(plot.x_values)
    if plot.whole_x:
        across |= _plotly_whole_axis(plot.x_values) | {"minallowed": 0}
    if plot.shared_pointer:
        title = {"text": f"{escape(plot.x_label)} %{{x}}"}
        across |= {"unifiedhovertitle": title, "spikethickness": 1, "spikedash": "dot"}
    if plot.categories and not any(line.kind == "bars" for line in plot.lines):
        names = [escape(name) for name in plot.categories]
        across |= {"tickvals": list(range(len(names))), "ticktext": names}
    up: dict[str, Any] = {"title": {"text": _wrapped(plot.y_label, 28)}, "automargin": True, "zeroline": False, **gap}
    if plot.log_y:
        up |= _plotly_log_axis(plot.y_values)
    elif 0 in plot.y_includes:
        up |= {"rangemode": "tozero"}
    if plot.whole_y:
        up |= _plotly_whole_axis(plot.y_values) | {"minallowed": -0.5}  # with room below client 0
    if plot.horizontal:
        up["title"] = {"text": _wrapped(plot.y_label, 30)}
        across, up = up | _plotly_bar_range(plot), {"autorange": "reversed", "automargin": True, **gap}
    layout = {
        "height": plot.height,
        "xaxis": across,
        "yaxis": up,
        "hovermode": "x unified" if plot.shared_pointer else "closest",
        "barmode": "group",
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "margin": {"l": 60, "r": 16, "t": 32, "b": 48},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "modebar": {"bgcolor": CLEAR},
        "showlegend": len(plot.lines) > 1,
        "uirevision": plot.key,  # zoom and hidden lines stay when numbers change
        "dragmode": False,  # a finger scrolls the page; plotly's buttons zoom
    }
    if plot.reference is not None:
        dotted = {"color": NEUTRAL, "width": 1, "dash": "dot"}
        along, at = ("y", "x") if plot.horizontal else ("x", "y")
        ends = {f"{along}ref": "paper", f"{along}0": 0, f"{along}1": 1}
        layout["shapes"] = [
            {"type": "line", "line": dotted, **ends, f"{at}0": plot.reference, f"{at}1": plot.reference}
        ]
    return layout


def _plotly_bar_range(plot: Plot) -> dict[str, Any]:
    """Return an axis with room for the numbers at the ends of bars."""
    low, high, log = bar_limits(plot)
    return {"type": "log", "range": [math.log10(low), math.log10(high)]} if log else {"range": [low, high]}


def _plotly_log_axis(values: Sequence[float]) -> dict[str, Any]:
    """Return an axis with some numbers on it, but not so many that they overlap on a phone."""
    known = [value for value in values if 0 < value < math.inf]
    decades = math.log10(max(known) / min(known)) if known else 0.0
    axis: dict[str, Any] = {"type": "log", "tickformat": "~g"}
    if 0 < decades < 0.9:  # perhaps without a power of ten
        return axis | {"nticks": 4}
    return axis | {"dtick": "D2" if decades < 3 else 1}  # D2: with 2 and 5 between powers of ten


def _plotly_whole_axis(values: Sequence[float]) -> dict[str, Any]:
    """Return an axis without halves: there is no round or client between two others."""
    few = max(values, default=0) - min(values, default=0) <= FEW
    return {"tickformat": ",~g"} | ({"dtick": 1} if few else {})


def _wrapped(text: str, longest: int = 36) -> str:
    """Return text in lines that fit a phone. It is escaped, since plotly reads tags in its texts."""
    return "<br>".join(escape(line) for line in textwrap.wrap(text, longest))


def _wrapped_name(name: str) -> str:
    """Return a category's name with its own lines."""
    return "<br>".join(escape(line) for line in name.split("\n"))


def _json_numbers(values: Sequence[float]) -> list[float | None]:
    """Return values as JSON can hold them: NaN and infinities leave gaps."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


# matplotlib, for PNG files and for pages without scripts.

STYLES: dict[str, Literal["-", "--", ":", "-."]] = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
MARKERS = {"circle": "o", "x": "x", "circle-open": "o", "square": "s", "diamond": "D"}
GRID_ALPHA = 0.18
PANEL = (7.2, 4.4)  # inches of a PNG file with one plot
PAIR = (11.0, 4.6)  # of one with two plots side by side
MANY = 8  # more lines than this have their legend outside, where it covers none of them
MAX_IN_LEGEND = 40
LEGEND_HANDLE = 3.2  # font sizes: dashes can be seen beside a mark
MAX_LOG_TICKS = 9
LOG_STEPS: dict[tuple[float, ...], int] = {  # numbers in each decade → how many must be on an axis if it has only them
    (1,): 4,
    (1, 2, 5): 3,
    (1, 1.5, 2, 3, 5, 7): 3,
    (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9): 3,
}

SVG_INK = "#010203"  # stands for the page's own colour of text, which a file cannot know
SVG_WIDTH, SVG_HEIGHT, SVG_LEGEND_ROW = 6.0, 3.4, 0.2  # inches
LEGEND_COLUMNS, LEGEND_SIGN = 4, 6  # columns, and the characters that the sign beside a name takes
AXIS_CHARACTERS, NAME_CHARACTERS = 75, 18  # that fit below the axis side by side, and of one name there


def save_png(plots: Sequence[Plot], path: Path, *, side_by_side: bool = False) -> Path:
    """Write plots as one PNG file and return its path."""
    picture = io.BytesIO()
    render_matplotlib(plots, side_by_side=side_by_side).savefig(picture)
    write_atomically(path, picture.getvalue())
    return path


def render_matplotlib(plots: Sequence[Plot], *, side_by_side: bool = False) -> "Figure":
    """Return a figure with a panel for each plot, below each other or side by side."""
    from matplotlib.figure import Figure

    tallest = max(1.4 + 0.36 * len(plot.categories) if plot.horizontal else PANEL[1] for plot in plots)
    size = PAIR if side_by_side else (PANEL[0], tallest * len(plots))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    rows, columns = (1, len(plots)) if side_by_side else (len(plots), 1)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=side_by_side and len({p.y_label for p in plots}) == 1)
    plots = [in_axis_units(plot) for plot in plots]
    for plot, axes in zip(plots, panels.flat, strict=True):
        _draw(axes, plot)
        axes.set_title(escape_dollars(plot.heading), fontsize=10)
        if axes is not panels.flat[0] and axes.get_shared_y_axes().joined(axes, panels.flat[0]):
            axes.set_ylabel("")
    _add_legends(figure, plots, list(panels.flat))
    return figure


def render_svg(plot: Plot) -> str:
    """Return an SVG element whose text and axes have the colour of the text around it, for pages without scripts."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    inked = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), SVG_INK)
    look: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": plot.key, "font.size": 9, **inked}
    plot = in_axis_units(plot)
    with rc_context(look):
        # margins of fixed sizes: matplotlib's layout engines draw everything twice to find them
        named = [line for line in plot.lines if line.in_legend]
        has_legend = 1 < len(named) <= MAX_IN_LEGEND
        legend = SVG_LEGEND_ROW * -(-len(named) // _legend_columns(plot)) if has_legend else 0.0
        below = legend + (1.3 if _is_turned(plot) else 0.5)
        longest = max((len(part) for name in plot.categories for part in name.split("\n")), default=0)
        left = 0.4 + 0.07 * longest if plot.horizontal else 0.8
        height = SVG_HEIGHT + legend
        figure = Figure(figsize=(SVG_WIDTH, height))
        box = (left / SVG_WIDTH, below / height, 1 - (left + 0.2) / SVG_WIDTH, 1 - (below + 0.1) / height)
        axes = figure.add_axes(box)
        _draw(axes, plot, ink=SVG_INK)
        if has_legend:
            columns = _legend_columns(plot)
            figure.legend(
                loc="lower left",
                ncols=columns,
                fontsize=8,
                frameon=False,
                borderaxespad=0.1,
                handlelength=LEGEND_HANDLE,
            )
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return _within_a_page(out.getvalue(), plot)


def escape_dollars(name: str) -> str:
    """Return a name that matplotlib shows letter by letter: dollars would begin a formula."""
    return name.replace("$", r"\$")


def _draw(axes: "Axes", plot: Plot, ink: str = "black") -> None:
    bars = [line for line in plot.lines if line.kind == "bars"]
    for line in plot.lines:
        if line.kind == "bars":
            _draw_bars(axes, plot, line, bars.index(line), len(bars))
        else:
            _draw_line(axes, line)
    _finish_axes(axes, plot, ink)


def _draw_line(axes: "Axes", line: Line) -> None:
    points = line.kind == "points"
    axes.plot(
        line.x,
        line.y,
        linestyle="none" if points else STYLES[DASHES[line.dash % len(DASHES)]],
        marker=MARKERS[line.symbol] if points else "o" if line.has_marks else None,
        markerfacecolor="none" if line.symbol == "circle-open" else line.colour,
        markersize=_marker_size(line),
        color=line.colour,
        linewidth=1.6,
        alpha=0.85,
        label=escape_dollars(line.label) if line.in_legend else "_",
    )
    if any(line.band):
        above = [y + d for y, d in zip(line.y, line.band, strict=True)]
        below = [y - d for y, d in zip(line.y, line.band, strict=True)]
        axes.fill_between(line.x, below, above, color=line.colour, alpha=0.15, linewidth=0)


def _marker_size(line: Line) -> float:
    if line.kind == "line":
        return 3.5
    size = 5 if len(line.x) < 60 else 3 if len(line.x) < 200 else 2
    return size + 3 if line.symbol in LARGE_SYMBOLS else size


def _draw_bars(axes: "Axes", plot: Plot, line: Line, number: int, of: int) -> None:
    """Draw one of several bars in each category, beside the others."""
    width = 0.8 / of
    places = [x + (number + 0.5) * width - 0.4 for x in line.x]
    lengths = [0.0 if math.isnan(y) else y for y in line.y]
    label = escape_dollars(line.label)
    look: dict[str, Any] = {"color": line.colour, "label": label}
    if line.hatched:
        look |= {"hatch": "////", "edgecolor": MEASURE, "linewidth": 0}
    if not plot.horizontal:
        axes.bar(places, lengths, width, **look)
        return
    bars = axes.barh(places, lengths, width, **look)
    axes.bar_label(bars, [f" {plot.missing if math.isnan(y) else f'{y:.2f}'}" for y in line.y], fontsize=8)


def _finish_axes(axes: "Axes", plot: Plot, ink: str) -> None:
    from matplotlib.ticker import MaxNLocator

    if plot.log_x:
        if around := _decade_around(plot.x_values):
            axes.set_xlim(around)
        axes.set_xscale("log")
        _label_log_axis(axes.xaxis, axes.get_xlim())
    if plot.log_y:
        if around := _decade_around(plot.y_values):
            axes.set_ylim(around)
        axes.set_yscale("log")
    _include(axes, plot)
    if plot.log_y:
        _label_log_axis(axes.yaxis, axes.get_ylim())
    for axis in [axes.xaxis] * plot.whole_x + [axes.yaxis] * plot.whole_y:
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if plot.horizontal:
        _finish_horizontal(axes, plot, ink)
        return
    if plot.categories:
        turned = _is_turned(plot)
        names = [escape_dollars(name[-NAME_CHARACTERS:]) for name in plot.categories]
        axes.set_xticks(range(len(names)), names, rotation=60 if turned else 0, ha="right" if turned else "center")
    if plot.reference is not None:
        axes.axhline(plot.reference, color=ink, linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xlabel(escape_dollars(plot.x_label))
    axes.set_ylabel(escape_dollars(plot.y_label))
    axes.grid(axis="y" if plot.categories else "both", alpha=GRID_ALPHA, color=ink, linewidth=0.5)
    axes.set_axisbelow(True)


def _finish_horizontal(axes: "Axes", plot: Plot, ink: str) -> None:
    names = [escape_dollars(name) for name in plot.categories]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)  # the first on top
    low, high, log = bar_limits(plot)
    if log:
        axes.set_xscale("log")
    axes.set_xlim(low, high)
    if log:
        _label_log_axis(axes.xaxis, (low, high))
    if plot.reference is not None:
        axes.axvline(plot.reference, color=ink, linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xlabel(escape_dollars(plot.y_label))
    axes.grid(axis="x", alpha=GRID_ALPHA, color=ink, linewidth=0.5)
    axes.set_axisbelow(True)


def _include(axes: "Axes", plot: Plot) -> None:
    """Have the vertical axis reach the values that it must show, and end there if they are the outermost."""
    known = [y for y in plot.y_values if math.isfinite(y)]
    if not plot.y_includes or not known:
        return
    if min(plot.y_includes) <= min(known):
        axes.set_ylim(bottom=min(plot.y_includes))
    if max(plot.y_includes) >= max(known):
        axes.set_ylim(top=max(plot.y_includes))


def _decade_around(values: Sequence[float]) -> tuple[float, float] | None:
    """Return limits around values that are all the same, for some of which matplotlib finds no range at all."""
    if not values or min(values) <= 0 or not math.isclose(min(values), max(values)):
        return None
    return min(values) / math.sqrt(10), max(values) * math.sqrt(10)


def _label_log_axis(axis: "Axis", limits: tuple[float, float]) -> None:
    """Give a logarithmic axis numbers that can be read, also if there is no power of ten on it."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(log_ticks(*limits)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def log_ticks(low: float, high: float) -> list[float]:
    """Return at least two and at most nine round numbers between the limits of a logarithmic axis."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps, enough in LOG_STEPS.items():
        ticks = [float(f"{step * 10.0**exponent:.3g}") for exponent in exponents for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= enough:
            return ticks[:: -(-len(ticks) // MAX_LOG_TICKS)]
    step = 10.0 ** math.floor(math.log10((high - low) / 2))  # so narrow that the axis is almost linear
    step *= next(nice for nice in (5, 2, 1) if nice * step * 2 <= high - low)
    first = math.ceil(low / step)
    return [float(f"{number * step:.12g}") for number in range(first, math.floor(high / step) + 1)]


def _add_legends(figure: "Figure", plots: Sequence[Plot], panels: Sequence["Axes"]) -> None:
    """Give each panel a legend, or one for all panels beside them if it would cover the lines."""
    most = max(sum(line.in_legend for line in plot.lines) for plot in plots)
    if any(plot.run_labels for plot in plots):
        _add_run_and_tier_legends(figure, panels[0], plots[0])
    elif most > MANY:
        if most <= MAX_IN_LEGEND:
            handles, _ = panels[0].get_legend_handles_labels()
            named = [line for line in plots[0].lines if line.in_legend]
            # in several panels the same name stands for models of several sizes
            labels = [line.run or line.label if len(plots) > 1 else line.full_label for line in named]
            names = [escape_dollars(label) for label in labels]
            figure.legend(handles, names, loc="outside right center", fontsize=8, handlelength=LEGEND_HANDLE)
    else:
        alike = len({tuple(line.label for line in plot.lines) for plot in plots}) == 1 and len(plots) > 1
        below = any(
            plot.legend_below or (plot.categories and not any(line.kind == "bars" for line in plot.lines))
            for plot in plots
        )
        for plot, axes in list(zip(plots, panels, strict=True))[: 1 if alike and not below else None]:
            _add_legend(axes, plot, below=below)


def _add_legend(axes: "Axes", plot: Plot, *, below: bool) -> None:
    handles, _ = axes.get_legend_handles_labels()
    if not handles:
        return
    labels = [escape_dollars(line.full_label) for line in plot.lines if line.in_legend]
    # points by category fill the whole panel; "best" is also the default, but only where it is named does a slow
    # search for the place not warn
    where: dict[str, Any] = {"loc": "best"}
    if below:
        where = {"loc": "upper left", "bbox_to_anchor": (0, -0.13), "frameon": False}
    columns = _legend_columns(plot) if below else 1
    axes.legend(handles, labels, title=plot.legend_title, fontsize=8, title_fontsize=8, ncols=columns,
                alignment="left", handlelength=LEGEND_HANDLE, **where)  # fmt: skip


def _add_run_and_tier_legends(figure: "Figure", axes: "Axes", plot: Plot) -> None:
    """Explain dashes or symbols, which are runs, and colours, which are tiers."""
    from matplotlib.lines import Line2D

    def sign(line: Line, colour: str, label: str, *, of_run: bool) -> Line2D:
        if line.kind == "points":
            marker = MARKERS[line.symbol] if of_run else "o"
            face = "none" if of_run and line.symbol == "circle-open" else colour
            return Line2D([], [], color=colour, linestyle="none", marker=marker, markerfacecolor=face, label=label)
        style = STYLES[DASHES[line.dash % len(DASHES)]] if of_run else "-"
        return Line2D([], [], color=colour, linestyle=style, label=label)

    runs = {line.run: line for line in plot.lines}
    tiers = {line.tier: line for line in plot.lines}
    of_runs = [
        sign(line, MEASURE, escape_dollars(plot.run_labels.get(run, run)), of_run=True) for run, line in runs.items()
    ]
    of_tiers = [sign(line, line.colour, escape_dollars(tier), of_run=False) for tier, line in tiers.items()]
    if any(line.kind == "points" for line in plot.lines):  # a legend inside might cover some
        headings = [Line2D([], [], linestyle="none", label=text) for text in ("tier", plot.legend_title)]
        handles = [headings[0], *of_tiers, headings[1], *of_runs]
        figure.legend(handles=handles, loc="outside right center", fontsize=8, frameon=False)
        return
    figure.legend(handles=of_runs, loc="outside upper left", fontsize=8, frameon=False, handlelength=LEGEND_HANDLE)
    axes.legend(handles=of_tiers, title="tier", fontsize=8, loc="best")


def _legend_columns(plot: Plot) -> int:
    """Return how many names of the legend fit side by side."""
    longest = max(len(line.label) for line in plot.lines)
    return max(1, min(LEGEND_COLUMNS, int(1.2 * AXIS_CHARACTERS) // (LEGEND_SIGN + longest)))


def _is_turned(plot: Plot) -> bool:
    return not plot.horizontal and sum(map(len, plot.categories)) > AXIS_CHARACTERS


_COLOUR = re.compile(rf"\b(fill|stroke): ({'|'.join(DARK_TWINS)})\b")


def _within_a_page(svg: str, plot: Plot) -> str:
    element = svg[svg.index("<svg") :].replace(SVG_INK, "currentColor")
    element = _COLOUR.sub(lambda found: f"{found[1]}: var({css_variable(found[2])}, {found[2]})", element)
    element = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", element, flags=re.DOTALL)  # styles would be the page's
    # ids belong to the whole page: matplotlib numbers them from 1 in each picture, so they would be there many times
    element = re.sub(r'id="[A-Za-z][\w.]*_\d+"', "", element)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'class="{plot.key}"', element, count=1)
