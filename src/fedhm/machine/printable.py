"""Text from other sources, such as a client or a log, made safe for a line of a terminal, record or report."""

import io
import re
import shlex

LONGEST = 300  # characters
_LINE_BREAK = re.compile(r"\s*[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]\s*")


def printable(text: str, longest: int = LONGEST) -> str:
    """Return text as one line without any character that controls a terminal.

    Escape sequences and other control characters could colour or clear the screen. Bidirectional overrides could show
    another text than the written one. Rich's markup stays, since records keep the original text: code that prints with
    rich must pass `markup=False` or escape it.
    """
    line = _LINE_BREAK.sub(" ", text[: 4 * longest].strip())
    shown = "".join(letter if letter.isprintable() else " " if letter.isspace() else "�" for letter in line)
    return shown if len(shown) <= longest and len(text) <= 4 * longest else shown[: longest - 1] + "…"


def quoted_command(*words: object) -> str:
    """Return a command to paste into a shell, in quotes for a sentence unless it contains quotes itself."""
    command = shlex.join(str(word) for word in words)
    return command if "'" in command else f"'{command}'"


def printable_lines(text: str, longest: int = 10 * LONGEST) -> str:
    """Return text of several lines, each made printable."""
    return "\n".join(printable(line, longest) for line in text.split("\n"))


def accept_any_text(*streams: object) -> None:
    """Make streams print a ? for a character that their encoding does not have, instead of raising."""
    for stream in streams:
        # a stream that the user's program put in place, or no stream at all, stays as it is
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")
