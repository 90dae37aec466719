"""The plots of the convergence bound, from the records that runs leave."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fedhm.report import save_report
from fedhm.report.plot import last_values, render_matplotlib, render_plotly, render_svg, render_table
from fedhm.report.plots import BOUND_TERMS, MEASURED, theory_plots
from fedhm.report.sections import run_sections
from fedhm.report.tables import run_caption
from fedhm.runs.history import Run
from fedhm.server.filters.theory import PREFIX
from fedhm.server.record import Record, Traffic
from made_runs import made_run

ROUNDS = 3


def run(name: str = "mine", **changed: float) -> Run:
    """Return a run whose values are 10 to the power of the round, times the place of their name."""
    made = made_run(name, {"full": 100}, [{"full": 0.5}] * ROUNDS, evaluation={"diagnostics": "theory"})
    names = [*MEASURED, *BOUND_TERMS]

    def measured(record: Record) -> Record:
        values = {each: place * 10.0 ** (record.round - 4) for place, each in enumerate(names, start=1)}
        found = {f"{PREFIX}{each}": value for each, value in (values | changed).items() if not math.isnan(value)}
        return replace(record, diagnostics={"kappa_uv": 1.0, **found}, statistics=Traffic(1, 1, 300, 60))

    return replace(made, records=[measured(record) for record in made.records])


def test_a_line_for_each_quantity() -> None:
    plots = theory_plots([run()])
    for plot, names in zip(plots, (MEASURED, BOUND_TERMS), strict=True):
        assert [line.label for line in plot.lines] == list(names.values())
        assert all(list(line.x) == [1, 2, 3] for line in plot.lines)
        figure = render_matplotlib([plot])
        (axes,) = figure.axes
        assert axes.get_yscale() == "log"
        assert [list(line.get_ydata()) for line in axes.lines] == [list(line.y) for line in plot.lines]
        legend = axes.get_legend()
        assert legend is not None
        assert [text.get_text() for text in legend.get_texts()] == list(names.values())
        assert render_plotly(plot)["layout"]["yaxis"]["type"] == "log"
        assert "currentColor" in render_svg(plot)
        rows = list(render_table(plot).rows)
        assert rows[0][:2] == ["1", f"{plot.lines[0].y[0]:.4g}"]  # four digits, however small
    assert last_values(plots[0].lines, 3, significant=3).startswith("‖∇g‖² at the mean of the factors: 0.1;")


def test_several_runs_and_zeros() -> None:
    first, second = run("a"), run("b", drift=0.0, **{"bound/start": math.nan})
    measured, terms = theory_plots([first, second])
    assert len(measured.lines) == 2 * len(MEASURED) - 1  # a drift of 0 in all rounds has no place on the axis
    assert len(terms.lines) == 2 * len(BOUND_TERMS) - 1
    assert {line.dash for line in terms.lines} == {0, 1}
    assert terms.lines[-1].label.startswith("b, ")
    records = [
        first.records[0],
        *(replace(r, diagnostics={**r.diagnostics, f"{PREFIX}drift": 0.0}) for r in first.records[1:]),
    ]
    (line,) = [line for line in theory_plots([replace(first, records=records)])[0].lines if "drift of" in line.label]
    assert [math.isnan(value) for value in line.y] == [False, True, True]


@pytest.mark.slow
def test_the_report_has_it_where_it_was_measured(tmp_path: Path) -> None:
    assert tmp_path / "theory.png" in save_report([run()], tmp_path)
    assert "Terms of the convergence bound" in (tmp_path / "report.html").read_text()
    plain = made_run("plain", {"full": 100}, [{"full": 0.5}])
    assert not theory_plots([plain])
    assert "Theory" not in [section.heading for section in run_sections([plain])]
    assert "Theory" in [section.heading for section in run_sections([plain, run()])]


def test_the_table_says_what_gradients_cost() -> None:
    caption = run_caption([run()])
    assert "Gathering gradients and BatchNorm statistics adds 360 B a client in a round, in the mean." in caption
