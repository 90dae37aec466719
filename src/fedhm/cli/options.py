"""Shared by the verbs: types of options (`type=` of argparse), the arguments that name a config, and the terminal."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from fedhm.errors import FedhmError

if TYPE_CHECKING:
    from rich.console import Console

    from fedhm.models.own import OwnModel

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_config(parser: argparse.ArgumentParser, default: str | None = "digits") -> None:
    """Add the preset or config file, and --set."""
    hint = f"default: {default}" if default else "see 'fedhm presets'"
    parser.add_argument("config", nargs="?", default=default, metavar="PRESET or file.toml", help=hint)
    add_changes(parser)


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add --set."""
    parser.add_argument(
        "--set",
        dest="changes",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="change settings, such as train.lr=0.05",
    )


def accept_negative_sizes(parser: argparse.ArgumentParser) -> None:
    """Let -5MB be the value of an option, which is refused with a reason, instead of an unknown option."""
    parser._negative_number_matcher = re.compile(r"-\d")


def print_text(text: str) -> None:
    """Print a text as it is, also to a reader that does not read all of it, as `head` does."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def terminal() -> "Console":
    """Return the terminal that verbs print to."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            """Keep running when the reader of our output went away, as `head` does."""
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return Terminal()


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add --model: a user's own model."""
    parser.add_argument(
        "--model",
        metavar="FILE.py:FUNCTION",
        help="a model of your own, in place of [model]: a function without arguments that makes it",
    )


def own_model(options: argparse.Namespace) -> "OwnModel | None":
    """Return the model that --model names."""
    if options.model is None:
        return None
    from fedhm.models.own import load_function

    return load_function(options.model)


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
