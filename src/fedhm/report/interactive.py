"""Plots as figures of plotly.js: JSON that its `Plotly.react` draws."""

import math
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

from fedhm.report.plot import DASHES, Line, Plot

FEW = 12  # rounds or clients, each of which has its number beside the axis
CLEAR = "rgba(0,0,0,0)"  # the page's own colours show through, in the light and in the dark


def figure(plot: Plot) -> dict[str, Any]:
    """Return data and layout of a plot."""
    traces = [trace for line in plot.lines for trace in (*_band(line), _trace(plot, line))]
    return {"data": traces, "layout": _layout(plot), "height": plot.height}


def _trace(plot: Plot, line: Line) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "name": _wrapped(line.label),
        "x": [plot.categories[int(x)] for x in line.x] if line.kind == "bars" else _numbers(line.x),
        "y": _numbers(line.y),
        "meta": {"run": line.run, "tier": line.tier},
        "hovertemplate": _under_pointer(plot, line),
    }
    if line.hints:
        trace["customdata"] = [escape(hint) for hint in line.hints]
    if line.kind == "bars":
        return trace | {"type": "bar", "marker": {"color": line.colour}}
    mode = "markers" if line.kind == "points" else "lines+markers" if len(line.x) < 3 else "lines"
    look = {"color": line.colour, "dash": DASHES[line.dash % len(DASHES)], "width": 2}
    marker = {"color": line.colour, "symbol": line.symbol, "size": 7}
    return trace | {"type": "scatter", "mode": mode, "line": look, "marker": marker}


def _band(line: Line) -> list[dict[str, Any]]:
    """Return the area within a deviation of a line, if it has one: there and back again."""
    if not any(line.around):
        return []
    above = [y + d for y, d in zip(line.y, line.around, strict=True)]
    below = [y - d for y, d in zip(line.y, line.around, strict=True)]
    return [
        {
            "type": "scatter",
            "x": _numbers([*line.x, *reversed(line.x)]),
            "y": _numbers([*above, *reversed(below)]),
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


def _under_pointer(plot: Plot, line: Line) -> str:
    value = f"%{{y:,.{plot.decimals}f}}"
    hint = " %{customdata}" if line.hints else ""
    if plot.together:
        return f"{value}{hint}"
    place = "%{x}" if plot.categories or plot.whole_x else "%{x:,.4g}"
    return f"{value} at {place}{hint}<extra>%{{fullData.name}}</extra>"


def _layout(plot: Plot) -> dict[str, Any]:
    across: dict[str, Any] = {"title": {"text": _wrapped(plot.x_label)}, "automargin": True, "zeroline": False}
    if plot.log_x:
        across |= _logarithmic([x for line in plot.lines for x in line.x])
    if plot.whole_x:
        across |= _whole([x for line in plot.lines for x in line.x]) | {"minallowed": 0}
    if plot.together:
        title = {"text": f"{escape(plot.x_label)} %{{x}}"}
        across |= {"unifiedhovertitle": title, "spikethickness": 1, "spikedash": "dot"}
    if plot.categories and not any(line.kind == "bars" for line in plot.lines):
        names = [escape(name) for name in plot.categories]
        across |= {"tickvals": list(range(len(names))), "ticktext": names}
    up: dict[str, Any] = {"title": {"text": _wrapped(plot.y_label, 28)}, "automargin": True, "zeroline": False}
    if plot.log_y:
        up |= _logarithmic([y for line in plot.lines for y in line.y])
    if plot.whole_y:
        up |= _whole([y for line in plot.lines for y in line.y]) | {"minallowed": -0.5}  # with room below client 0
    return {
        "height": plot.height,
        "xaxis": across,
        "yaxis": up,
        "hovermode": "x unified" if plot.together else "closest",
        "barmode": "group",
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "margin": {"l": 60, "r": 16, "t": 32, "b": 48},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "modebar": {"bgcolor": CLEAR},
        "showlegend": len(plot.lines) > 1,
        "uirevision": plot.key,  # zoom and switched-off lines stay when numbers change
        "dragmode": False,  # a finger scrolls the page; plotly's buttons zoom
    }


def _logarithmic(values: Sequence[float]) -> dict[str, Any]:
    """Return an axis with some numbers on it, and not with so many that they overlap on a phone."""
    known = [value for value in values if 0 < value < math.inf]
    decades = math.log10(max(known) / min(known)) if known else 0.0
    axis: dict[str, Any] = {"type": "log", "tickformat": "~g"}
    if 0 < decades < 0.9:  # which has perhaps no power of ten in it
        return axis | {"nticks": 4}
    return axis | {"dtick": "D2" if decades < 3 else 1}  # D2: with 2 and 5 between powers of ten


def _whole(values: Sequence[float]) -> dict[str, Any]:
    """Return an axis without halves: there is no round or client between two others."""
    few = max(values, default=0) - min(values, default=0) <= FEW
    return {"tickformat": ",~g"} | ({"dtick": 1} if few else {})


def _wrapped(text: str, longest: int = 36) -> str:
    """Return text in lines that fit a phone; plotly reads tags in its texts."""
    return "<br>".join(escape(line) for line in textwrap.wrap(text, longest))


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Return values as JSON can have them: NaN and infinities leave gaps."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
