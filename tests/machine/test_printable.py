"""Text from elsewhere can be read, and can do nothing."""

import io
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedhm.machine.printable import LONGEST, printable, printable_lines, quoted_command

C1_CLEAR = "\x9b2J"  # what ESC [ 2 J does, in one character less
TITLE = "\x1b]0;owned\x07"
OVERRIDE = "\u202etxt.exe\u2066"


@given(st.text(st.characters(codec=None), max_size=2 * LONGEST))  # surrogates among them
def test_whatever_was_written_is_a_bounded_line_that_only_shows(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) <= LONGEST
    assert printable(shown) == shown
    assert shown.encode().decode() == shown


@given(st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=LONGEST))
def test_what_can_be_shown_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "�[31mred�[0m"),
        (C1_CLEAR, "�2J"),
        (TITLE, "�]0;owned�"),
        (OVERRIDE, "�txt.exe�"),
        ("one\r\n   two\ttabs\x85next\u2028line ", "one two tabs next line"),
        ("no\xa0break, two  spaces", "no break, two  spaces"),
        ("zero\u200bwidth\x00\x7f\b", "zero�width���"),
        ("[red]markup[/] stays", "[red]markup[/] stays"),
    ],
)
def test_examples(written: str, shown: str) -> None:
    assert printable(written) == shown


def test_long_text_is_cut_and_says_so() -> None:
    assert printable("x" * 10**6) == "x" * (LONGEST - 1) + "…"
    assert printable("x" * LONGEST) == "x" * LONGEST
    assert printable(" " * 10**6 + "x") == "…"
    assert printable("abcdef", longest=3) == "ab…"


def test_lines_stay_lines() -> None:
    assert printable_lines("one\ntwo\x1b[2J\nthree") == "one\ntwo�[2J\nthree"


def test_rich_shows_it_as_it_was_written() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    console.print(printable("[red]markup[/] \x1b[2J"), markup=False, highlight=False)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "[red]markup[/] �[2J\n"


@pytest.mark.parametrize("path", ["runs/digits", "my runs/it's", "$HOME;rm", "a*b"])
def test_an_advised_command_can_be_pasted(path: str) -> None:
    told = quoted_command("echo", path)
    command = told if "'" in told[1:-1] else told.strip("'")
    assert subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout == path + "\n"
