"""One plot, three renderers: plotly, matplotlib and the table show the same numbers."""

import math

import pytest

from fedhm.report.format import (
    format_bytes,
    format_macs,
    format_memory,
    format_parameters,
    format_si,
    format_total_macs,
)
from fedhm.report.plot import Line, Plot, render_matplotlib, render_plotly, render_svg, render_table
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
    assert [text.get_text() for text in legend.get_texts()] == ["full, 1.0 k", "1/4, 0.3 k"]


def test_a_missing_bar_is_named_and_leaves_a_gap() -> None:
    lines = [Line("cost", [0, 1], [0.5, math.nan], "#000000", kind="bars")]
    plot = Plot(
        "cost", "entry", "ratio", lines, "words", categories=["a", "b$"], horizontal=True, missing="not reached"
    )
    assert list(render_table(plot).rows) == [["a", "0.5000"], ["b$", "not reached"]]
    assert render_plotly(plot)["data"][0]["y"] == [0.5, None]
    (axes,) = render_matplotlib([plot]).axes
    assert [text.get_text().strip() for text in axes.texts] == ["0.50", "not reached"]
    assert "not reached" in render_svg(plot)


def test_axes_have_units() -> None:
    plot = Plot("title", "sent", "y", [Line("line", [2e6, 4e7], [1, 2], "#000000")], "words", log_x=True, x_unit="B")
    assert [row[0] for row in render_table(plot).rows] == ["2 MB", "40 MB"]
    assert render_plotly(plot)["layout"]["xaxis"]["ticksuffix"] == "B"
    assert "10 MB" in render_svg(plot)


def test_numbers_have_readable_units() -> None:
    assert [format_bytes(count) for count in (None, 999, 12_340, 5e9)] == ["–", "999 B", "12.34 kB", "5.00 GB"]
    assert [format_memory(count) for count in (12_340, 1_234_500_000)] == ["12.34 kB", "1,234.5 MB"]
    assert [format_parameters(count) for count in (300, 999_999, 11_173_962)] == ["0.3 k", "1,000.0 k", "11.17 M"]
    assert [format_macs(count) for count in (500, 2_000_000, 5_000_000_000)] == ["0.5 k", "2.0 M", "5,000.0 M"]
    assert [format_total_macs(count) for count in (None, 2e5, 3e9, 4e15)] == ["–", "0.2 M", "3.0 G", "4,000.0 T"]
    assert [format_si(value, "s") for value in (0, 0.0025, 1234, 5e7)] == ["0 s", "2.5 ms", "1.234 ks", "50 Ms"]
