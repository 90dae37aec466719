"""Text from elsewhere, such as a client or a process's log, made fit for a line of a terminal, record or report."""

import re
import shlex

LONGEST = 300  # characters
_LINE_BREAK = re.compile(r"\s*[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]\s*")


def printable(text: str, longest: int = LONGEST) -> str:
    """Return text as one line that can only be read: nothing in it steers a terminal or turns the line around.

    Escape sequences and other control characters could colour or clear the screen, and bidirectional overrides show
    something else than what is written. Rich's markup stays, since records shall have what was written: whoever
    prints with rich says `markup=False`, or escapes it.
    """
    line = _LINE_BREAK.sub(" ", text[: 4 * longest].strip())
    shown = "".join(letter if letter.isprintable() else " " if letter.isspace() else "�" for letter in line)
    return shown if len(shown) <= longest and len(text) <= 4 * longest else shown[: longest - 1] + "…"


def quoted_command(*words: object) -> str:
    """Return a command that can be pasted into a shell, in quotes of a sentence unless it has some of its own."""
    command = shlex.join(str(word) for word in words)
    return command if "'" in command else f"'{command}'"


def printable_lines(text: str, longest: int = 10 * LONGEST) -> str:
    """Return text of several lines, each of them printable."""
    return "\n".join(printable(line, longest) for line in text.split("\n"))
