"""Text that others chose stays text: in Markdown without links or HTML, in CSV without formulas."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from fedhm.machine.printable import printable
from fedhm.report import save_report
from fedhm.report.sheets import (
    Sheet,
    csv_text,
    markdown_code,
    markdown_paragraph,
    markdown_picture,
    markdown_table,
    markdown_text,
    sheet_csv,
)
from made_runs import eventful_run, timed_run

MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table").enable("strikethrough")
EVIL = [
    "[click](http://evil.example)",
    "![x](http://evil.example/x.png)",
    "[x]: http://evil.example",
    "<script>alert(1)</script>",
    "<http://evil.example>",
    "a | b | c",
    "a\\| b",
    "# heading",
    "## heading\n\n- item",
    "`code`",
    "*a* _b_ __c__ ~~d~~",
    "&lt;b&gt; &amp;",
    "---",
    "1. one",
    "+ one",
    "> quoted",
    "=====",
    "\\",
    "**bold** __init__",
    "    indented",
    "a\r\n| new | row |",
]
texts = st.one_of(
    st.sampled_from(EVIL), st.text(st.sampled_from("ab1 \\`*_{}[]()<>#+-.!|~&=:/@$\n\t"), max_size=20), st.text()
)


def shown(markdown: str) -> tuple[str, set[str]]:
    """Return the text that Markdown shows, and the kinds of everything that is not text."""
    text, kinds = "", set()
    for token in MARKDOWN.parse(markdown):
        if token.type != "inline":
            kinds.add(token.tag)
        for child in token.children or ():
            text += child.content
            if child.type not in ("text", "text_special"):
                kinds.add(child.type)
    return text, kinds - {""}


@given(texts)
def test_any_text_is_one_paragraph_without_markup(text: str) -> None:
    expected = printable(text, max(1, len(text)))
    assert shown(markdown_paragraph(text)) == (expected, {"p"} if expected.strip() else set())


@given(texts)
def test_any_title_is_one_heading_without_markup(text: str) -> None:
    found, kinds = shown(f"### x{markdown_text(text)}x")
    assert found == f"x{printable(text, max(1, len(text)))}x"
    assert kinds == {"h3"}


@given(texts.filter(lambda text: "**" not in text), texts.filter(lambda text: "**" not in text))
def test_any_cell_is_one_cell_without_markup(first: str, second: str) -> None:
    table = markdown_table(Sheet(["x", "y"], [[[f"a{first}a", f"b{second}b"]]], left=2))
    found, kinds = shown(table)
    assert kinds == {"table", "thead", "tbody", "tr", "th", "td"}
    assert found == "xy" + "".join(printable(f"{n}{t}{n}", len(t) + 2) for n, t in (("a", first), ("b", second)))
    assert MARKDOWN.render(table).count("<td") == 2


@given(texts)
def test_any_command_is_code(text: str) -> None:
    expected = printable(f"fedhm {text}", len(text) + 6)
    assert shown(markdown_code(f"fedhm {text}")) == (expected, {"p", "code_inline"})


@pytest.mark.parametrize("text", ["https://evil.example/x", "see www.evil.example", "me@evil.example"])
def test_no_address_becomes_a_link_by_itself(text: str) -> None:
    assert not any(address in markdown_text(text) for address in ("://", "www.e", "e@"))


def test_bold_stays_bold_and_numbers_stay_as_they_are() -> None:
    table = markdown_table(Sheet(["tier", "1/2_x"], [[["a|b", "7.9 k ×2: **93.4 ± 0.1** (best -0.5)"]]], left=1))
    assert r"| a\|b | 7.9 k ×2: **93.4 ± 0.1** (best -0.5) |" in table
    assert "| tier | 1/2_x |" in table


def test_a_picture_is_beside_its_file() -> None:
    assert markdown_picture("a]b", "R² (x)-by.png") == "![a]b](R%C2%B2%20%28x%29-by.png)"


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t", "\r", "＝", " =", "\n="])
def test_no_text_is_a_formula_in_a_spreadsheet(begin: str) -> None:
    text = f"{begin}cmd|' /C calc'!A0"
    assert next(csv.reader(io.StringIO(csv_text([[text]]), newline=""))) == [f"'{text}"]


@pytest.mark.parametrize("number", [-0.5, 3, "-0.5", "+0.52", "-1,000.25", "1e-3", "-1.5e+10", None, "", "1/2", "a=b"])
def test_numbers_and_other_texts_stay_as_they_are(number: object) -> None:
    assert csv_text([[number, "x"]]) == f"{'' if number is None else number},x\r\n".replace("-1,000.25", '"-1,000.25"')


def test_tables_are_csv_without_marks_of_bold() -> None:
    assert sheet_csv(Sheet(["=a", "b"], [[["**-0.5**", "-x"]]], left=1)) == "'=a,b\r\n-0.5,'-x\r\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "[a](http://evil.example)", "<img src=x onerror=alert(1)>"])
def test_the_report_of_a_run_shows_names_and_reasons_as_text(name: str, tmp_path: Path) -> None:
    run = eventful_run(name, reason=name)
    run.records[-1].stopped = name
    timed = replace(timed_run(), name=name)
    for device in timed.config.federation.devices:
        object.__setattr__(device, "name", f"{name}{device.name}")
    save_report([run, timed], tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    kinds = shown(text)[1]
    assert kinds <= {"h3", "p", "table", "thead", "tbody", "tr", "th", "td"}
    assert name in shown(text)[0]
    with (tmp_path / "report.csv").open(encoding="utf-8", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "@"))]
    assert (f"'{name}" if name.startswith("=") else name) in cells
