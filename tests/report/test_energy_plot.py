"""The plot against rank collapse, from the records that runs leave."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest
from matplotlib.colors import to_hex

from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.data.federation import Federation
from fedhm.report import save_report
from fedhm.report.plot import Plot, save_png
from fedhm.report.plots import RESOLUTION, energy_plot, tier_colours
from fedhm.runs.history import Run
from made_runs import FACTS

TIERS = ("1/2", "1/4", "1/8")


def finished(federation: Federation, run: str, **method: Any) -> Run:
    config = small_config(method={"name": "fedhm", **method}, train={"rounds": 3})
    result = assemble(small_model(), federation, config).run()
    return Run(run, config, result.records, result.costs, FACTS)


def plot_of(runs: list[Run]) -> Plot:
    plot = energy_plot(runs)
    assert plot is not None
    return plot


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[matplotlib.figure.Figure]:
    """The figures that were written."""
    figures: list[matplotlib.figure.Figure] = []
    savefig = matplotlib.figure.Figure.savefig

    def remember(figure: matplotlib.figure.Figure, path: Path) -> None:
        figures.append(figure)
        savefig(figure, path)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", remember)
    return figures


def test_a_line_for_each_run_and_tier(
    federation: Federation, tmp_path: Path, drawn: list[matplotlib.figure.Figure]
) -> None:
    plain = finished(federation, "plain", name="fedavg")
    runs = [finished(federation, "paper", aggregate="models"), plain, finished(federation, "cure", aggregate="updates")]
    path = tmp_path / "energy.png"
    assert save_png([plot_of(runs)], path) == path
    assert path.stat().st_size > 1000
    (axes,) = drawn[0].axes
    assert axes.get_yscale() == "log"
    lines = iter(axes.lines)
    for run, style in ((runs[0], "-"), (runs[2], ":")):  # FedAvg's style is left out, as in the other plots
        for tier in TIERS:
            line = next(lines)
            assert list(line.get_xdata()) == [1, 2, 3]
            assert list(line.get_ydata()) == [
                100 * record.diagnostics[f"energy_beyond/{tier}"] for record in run.records
            ]
            assert line.get_linestyle() == style
            assert to_hex(line.get_color()) == to_hex(tier_colours(runs)[tier])
    assert next(lines, None) is None
    legends = [[text.get_text() for text in legend.get_texts()] for legend in (*drawn[0].legends, axes.get_legend())]
    assert legends == [["paper (averages models)", "cure (averages updates)"], list(TIERS)]


def test_nothing_beyond_stays_on_the_axis(
    federation: Federation, tmp_path: Path, drawn: list[matplotlib.figure.Figure]
) -> None:
    run = finished(federation, "run")
    gone = replace(run, records=[replace(r, diagnostics=dict.fromkeys(r.diagnostics, 0.0)) for r in run.records])
    save_png([plot_of([gone])], tmp_path / "energy.png")
    (axes,) = drawn[0].axes
    assert all(list(line.get_ydata()) == [100 * RESOLUTION] * 3 for line in axes.lines)
    assert 0 < axes.get_ylim()[0] < 100 * RESOLUTION


def test_without_the_diagnostic_there_is_no_plot(federation: Federation, tmp_path: Path) -> None:
    run = finished(federation, "run", name="fedavg")
    assert energy_plot([run]) is None
    assert "energy-beyond-rank.png" not in {path.name for path in save_report([run], tmp_path)}
    assert not list(tmp_path.glob("energy*"))
