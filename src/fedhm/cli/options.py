"""What the options of a command line take, and the sentence for what they do not: `type=` of argparse's arguments."""

import math
from collections.abc import Callable
from typing import Literal

from fedhm.errors import FedhmError


def whole_number(option: str, largest: int | None = None) -> Callable[[str], int]:
    """Return a function that reads a whole number from 1 on."""
    span = "from 1 on" if largest is None else f"from 1 to {largest}"

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > 18 or int(text) < 1 or (largest is not None and int(text) > largest):
            raise _refused(option, f"a whole number {span}", text)
        return int(text)

    return read


def whole_number_or_auto(option: str, largest: int | None = None) -> Callable[[str], int | Literal["auto"]]:
    """Return a function that reads a whole number from 1 on, or the word auto."""
    span = "from 1 on" if largest is None else f"from 1 to {largest}"

    def read(text: str) -> int | Literal["auto"]:
        if text == "auto":
            return "auto"
        try:
            return whole_number(option, largest)(text)
        except FedhmError:
            raise _refused(option, f"a whole number {span}, or auto", text) from None

    return read


def number(option: str, called: str, above: float = -math.inf, below: float = math.inf) -> Callable[[str], float]:
    """Return a function that reads a number between two others."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not above < value < below:
            raise _refused(option, called, text)
        return value

    return read


def one_of(option: str, *choices: str) -> Callable[[str], str]:
    """Return a function that reads one of a few words."""

    def read(text: str) -> str:
        if text not in choices:
            raise _refused(option, " or ".join(choices), text)
        return text

    return read


def _refused(option: str, called: str, text: str) -> FedhmError:
    return FedhmError(f"{option} takes {called}, not '{text[:80]}'")
