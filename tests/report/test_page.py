"""What the page holds, without a browser: tests/report/test_browser.py has what one makes of it."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import escape

from fedhm.report.page import render_page, run_switches, save_page
from fedhm.report.plot import MAX_TABLE_ROWS, Line, Plot, render_svg, render_table
from fedhm.report.sections import run_sections
from fedhm.runs.history import Run
from fedhm.runs.models import Layer
from made_runs import eventful_run, made_run, timed_run

EVIL = "<img src=x onerror=alert(1)>"


class Reader(HTMLParser):
    """Everything that is neither closed nor opened as it should be, and what tags there are."""

    VOID = ("meta", "link", "input", "br", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def shown(*runs: Run) -> str:
    return render_page("title", run_sections(runs), run_switches(runs))


@pytest.fixture(scope="module")
def text() -> str:
    other = made_run("plain", {"full": 1000, "1/4": 300}, [{"full": 0.4, "1/4": 0.3}], train={"lr": 0.2})
    return shown(eventful_run(), other)


@pytest.fixture(autouse=True)
def _without_pictures(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of single tests have none, since matplotlib takes most of the time; `text` was made with them before."""
    assert text
    monkeypatch.setattr("fedhm.report.page.render_svg", lambda _: "<svg></svg>")


def test_it_has_all_sections_and_is_well_formed(text: str) -> None:
    reader = Reader(text)
    headings = re.findall(r"<h2 [^>]*>(.*?)</h2>", text)
    expected = ["Rounds", "Tiers", "Accuracy", "Loss", "At the clients", "Spectrum", "Privacy", "Who took part"]
    assert headings == [*expected, "Layers", "Settings"]
    ids = [attributes["id"] for _, attributes in reader.tags if attributes.get("id")]
    assert len(set(ids)) == len(ids)
    assert {link["href"] for link in reader.named("a")} <= {f"#{each}" for each in ids}


def test_every_plot_has_a_picture_a_table_and_words(text: str) -> None:
    figures = text.split("<figure ")[1:]
    assert len(figures) == 12  # two metrics by three axes; clients, spectrum, ε, layers, and who took part in each run
    for each in figures:
        whole = each.partition("</figure>")[0]
        for tag in ("<svg", "<table>", "<caption>"):
            assert tag in whole
        assert len(re.findall(r'role="img" aria-label="[^"]{40,}"', whole)) == 2
    assert all(th.get("scope") in ("col", "row") for th in Reader(text).named("th"))


def test_it_asks_for_nothing_and_runs_only_its_own_scripts(text: str) -> None:
    reader = Reader(text)
    rules = next(m["content"] for m in reader.named("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert rules is not None
    assert rules.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src" not in rules
    assert not [a for tag, a in reader.tags if "src" in a or (tag == "link" and a["href"] != "data:,")]


def test_numbers_that_are_none_leave_gaps() -> None:
    run = made_run("run", {"full": 1000}, [{"full": float("nan")}, {"full": 0.5}, {"full": float("inf")}])
    found = re.search(r'id="figures">(.*?)</script>', shown(run))
    assert found
    figures = json.loads(found[1], parse_constant=pytest.fail)
    assert figures["plot-accuracy-by-round"]["data"][0]["y"] == [None, 50, None]


def test_what_comes_from_a_config_or_a_client_is_escaped() -> None:
    run = eventful_run(name=EVIL, reason=f"</script>{EVIL}", tier=f"1/4{EVIL}", source=EVIL)
    run = replace(run, layers={"full": {f"conv{EVIL}": Layer(9, 3), "norm": Layer(8)}})
    text = shown(run)
    assert EVIL not in text
    assert str(escape(EVIL)) in text
    reader = Reader(text)
    assert not reader.named("img")
    assert [a for _, a in reader.tags if any(name.startswith("on") for name in a)] == []
    assert len(reader.named("script")) == 3


def test_what_differs_between_runs_is_bold_and_comes_first(text: str) -> None:
    settings = text.partition('id="settings"')[2]
    rows = re.findall(r'<tr>\s*<th scope="row">(.*?)</th>\s*<td>(.*?)</td>\s*<td>(.*?)</td>', settings)
    assert ("train.lr", "<strong>0.05</strong>", "<strong>0.2</strong>") in rows[:30]
    assert ("train.batch", "8", "8") in rows
    assert "<strong>" not in shown(eventful_run()).partition('id="settings"')[2]


def test_who_was_dropped_and_cut_is_told_with_the_reason(text: str) -> None:
    part = text.partition('id="who-took-part"')[2].partition("</section>")[0]
    assert "Dropped, eventful" in part
    assert "it sent NaN" in part
    assert "from length 9 to 3" in part


def test_simulated_time_is_an_axis_where_all_records_know_it() -> None:
    run = timed_run()
    found = re.search(r'id="figures">(.*?)</script>', shown(run))
    assert found
    assert json.loads(found[1])["plot-accuracy-by-simulated-time"]["data"][0]["x"] == [10, 30, 60]
    run.records[0].simulated = None
    assert "simulated-time" not in shown(run)
    assert "simulated" not in shown(eventful_run())


def test_devices_are_told_with_who_took_part() -> None:
    part = shown(timed_run()).partition('id="who-took-part"')[2].partition("</section>")[0]
    assert "timed: simulated time by device" in part
    table = part.partition("simulated time by device")[2]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
    # device, clients, tier, then seconds in the mean of three rounds, and in how many it was the slowest
    assert ["fast", "4", "full", "1", "2", "3", "0", "0"] in rows
    assert ["slow", "4", "1/4", "16", "2", "2", "3", "0"] in rows


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([100 * 1e-7], ["5e-06", "1e-05", "2e-05"]),  # 100 * 1e-7 < 1e-5
        ([0.3], ["0.1", "0.2", "0.5"]),
        ([0.32, 0.38], ["0.32", "0.34", "0.36", "0.38"]),  # no power of ten lies between, nor 2 or 5 times one
        ([0.3, 4, 70], ["0.5", "1", "2", "5", "10", "20", "50"]),
        ([1e-3, 5, 9e4], ["0.001", "0.01", "0.1", "1", "10", "100", "1000", "10000", "100000"]),
    ],
)
def test_a_logarithmic_axis_has_numbers_whatever_its_values(values: list[float], ticks: list[str]) -> None:
    lines = [Line("line", values, values, "#000000")]
    drawn = render_svg(Plot("title", "x", "y", lines, "words", log_x=True, log_y=True))  # warnings are errors
    found = [each.replace("\N{MINUS SIGN}", "-") for each in re.findall(r">(\d[^<]*)</text>", drawn)]
    assert found == [*ticks, *ticks]


def test_clients_are_counted_in_whole_numbers() -> None:
    lines = [Line("line", [1], [0], "#000000", kind="points"), Line("line", [2], [1], "#000000", kind="points")]
    drawn = render_svg(Plot("title", "round", "client", lines, "words", whole_x=True, whole_y=True))
    assert re.findall(r">(\d[^<]*)</text>", drawn) == ["1", "2", "0", "1"]


def test_a_run_without_an_evaluated_round_has_a_page() -> None:
    run = replace(eventful_run(), records=[])
    assert "eventful has done 0 of its 3 rounds." in shown(run)


def test_long_tables_keep_their_last_row() -> None:
    rounds = list(range(1, 2 * MAX_TABLE_ROWS))
    plot = Plot("title", "round", "value", [Line("line", rounds, rounds, "#000000")], "words", whole_x=True)
    rows = list(render_table(plot).rows)
    assert len(rows) <= MAX_TABLE_ROWS
    assert rows[-1] == ["399", "399.0000"]


def test_the_file_is_whole_and_weighs_what_plotly_does(tmp_path: Path) -> None:
    path = save_page([eventful_run()], tmp_path)
    assert path == tmp_path / "report.html"
    assert path.read_text().rstrip().endswith("</html>")
    assert 1_190_000 < path.stat().st_size < 1_500_000
