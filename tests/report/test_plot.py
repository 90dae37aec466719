"""One plot, three renderers: plotly, matplotlib and the table show the same numbers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

from fedhm.report.format import (
    format_bytes,
    format_macs,
    format_memory,
    format_parameters,
    format_si,
    format_total_macs,
)
from fedhm.report.plot import (
    Line,
    Plot,
    in_axis_units,
    log_ticks,
    render_matplotlib,
    render_plotly,
    render_svg,
    render_table,
)
from fedhm.report.plots import metric_plots
from made_runs import made_run


def test_all_renderers_show_the_same_numbers() -> None:
    run = made_run("run", {"full": 1000, "1/4": 300}, [{"full": 0.2 * n, "1/4": 0.1 * n} for n in (1, 2, 3, 4)])
    plot = metric_plots([run], run.config.objective.headline)["round"]
    (axes,) = render_matplotlib([plot]).axes
    traces = render_plotly(plot)["data"]
    columns = list(zip(*render_table(plot).rows, strict=True))
    for number, expected in enumerate(([20, 40, 60, 80], [10, 20, 30, 40])):
        assert list(axes.lines[number].get_ydata()) == pytest.approx(expected)
        assert traces[number]["y"] == pytest.approx(expected)
        assert [float(cell) for cell in columns[number + 1]] == pytest.approx(expected)
    assert axes.get_title() == plot.heading == "Accuracy by round"
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["full, 1.0 k", "1/4, 300"]


def test_a_missing_bar_is_named_and_leaves_a_gap() -> None:
    lines = [Line("cost", [0, 1], [0.5, math.nan], "#000000", kind="bars")]
    plot = Plot(
        "cost", "entry", "ratio", lines, "words", categories=["a", "b$"], horizontal=True, missing="not reached"
    )
    assert list(render_table(plot).rows) == [["a", "0.5000"], ["b$", "not reached"]]
    (trace,) = render_plotly(plot)["data"]
    assert (trace["x"], trace["y"], trace["text"]) == ([0.5, None], ["a", "b$"], ["0.50", ""])
    (axes,) = render_matplotlib([plot]).axes
    assert [text.get_text().strip() for text in axes.texts] == ["0.50", "not reached"]
    assert "not reached" in render_svg(plot)


def test_numbers_along_an_axis_have_one_unit_which_its_label_names() -> None:
    plot = Plot("title", "sent", "y", [Line("line", [2e6, 4e7], [1, 2], "#000000")], "words", log_x=True, x_unit="B")
    assert [row[0] for row in render_table(plot).rows] == ["2 MB", "40 MB"]
    drawn = render_plotly(plot)
    assert drawn["layout"]["xaxis"]["title"]["text"] == "sent (MB)"
    assert drawn["data"][0]["x"] == [2, 40]
    assert "MB" in drawn["data"][0]["hovertemplate"]
    (axes,) = render_matplotlib([plot]).axes
    assert axes.get_xlabel() == "sent (MB)"
    assert list(axes.lines[0].get_xdata()) == [2, 40]
    assert "sent (MB)" in render_svg(plot)


def test_bars_have_the_unit_of_the_longest() -> None:
    lines = [Line("full", [0, 1], [300, 73_000], "#000000", kind="bars", band=[1000, 1000])]
    plot = in_axis_units(Plot("t", "layer", "parameters", lines, "words", y_unit="", categories=["a", "b"]))
    assert plot.y_label == "parameters (k)"
    assert plot.lines[0].y == [0.3, 73]
    assert plot.lines[0].band == [1, 1]
    few = replace(plot, lines=[Line("full", [0], [300], "#000000", kind="bars")], y_label="parameters", y_unit="")
    assert in_axis_units(few).y_label == "parameters"


@given(st.floats(1e-6, 1e6), st.floats(1.001, 1e8))
def test_a_logarithmic_axis_has_at_least_two_labels(low: float, ratio: float) -> None:
    high = low * ratio
    ticks = log_ticks(low, high)
    assert 2 <= len(ticks) <= 14
    assert all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.2], [0.28e6, 5.4e6], [9.1, 26.0], [0.11, 0.13], [1.0, 1e7]])
def test_pictures_label_logarithmic_axes(values: list[float]) -> None:
    lines = [Line("line", values, values, "#000000")]
    plot = Plot("title", "x", "y", lines, "words", log_x=True, log_y=True, x_unit="B")
    figure = render_matplotlib([plot])
    figure.canvas.draw()
    (axes,) = figure.axes
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        shown = [
            label.get_text() for label in axis.get_ticklabels() if low <= _place(label, axis is axes.xaxis) <= high
        ]
        assert len(set(shown)) == len(shown) >= 2


def _place(label: Text, across: bool) -> float:
    return float(label.get_position()[0 if across else 1])


def test_numbers_have_readable_units() -> None:
    assert [format_bytes(count) for count in (None, 999, 12_340, 5e9)] == ["–", "999 B", "12.34 kB", "5.00 GB"]
    assert [format_memory(count) for count in (12_340, 1_234_500_000)] == ["12.34 kB", "1,234.5 MB"]
    assert [format_parameters(count) for count in (300, 110_698, 999_999, 11_173_962)] == [
        *("300", "110.7 k", "1.00 M", "11.17 M")
    ]
    assert [format_macs(count) for count in (500, 2_000_000, 5_000_000_000)] == ["500", "2.0 M", "5,000.0 M"]
    assert [format_total_macs(count) for count in (None, 2e5, 3e9, 4e15)] == ["–", "0.2 M", "3.0 G", "4,000.0 T"]
    assert [format_si(value, "s") for value in (0, 0.0025, 1234)] == ["0 s", "2.5 ms", "1,234 s"]
    assert [format_si(value, "B") for value in (999, 1234, 5e7)] == ["999 B", "1.234 kB", "50 MB"]
