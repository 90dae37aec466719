"""The command line: fedhm run, resume, compare, sizes, fit, plan, profile, report, watch, export, presets, flower up.

Nothing heavy is imported before a command line is known to be right: torch alone takes seconds.
"""

import shlex
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import NoReturn

from fedhm.cli.interrupts import STOPPED, ended_at_once
from fedhm.cli.parser import make_parser
from fedhm.errors import FedhmError, show_warnings
from fedhm.machine.files import os_error_sentence
from fedhm.machine.printable import printable_lines
from fedhm.machine.process import run_and_exit

__all__ = ["command", "main"]


def command() -> NoReturn:
    """Be the command `fedhm`."""
    run_and_exit(main)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what a command line asks for and return the exit code; what is wrong is one sentence on stderr."""
    options = Namespace()
    try:
        with warnings.catch_warnings():
            show_warnings(lambda sentence: print(f"fedhm: {sentence}", file=sys.stderr))
            make_parser().parse_args(arguments, options)
            options.command = shlex.join(["fedhm", *(sys.argv[1:] if arguments is None else arguments)])
            with ended_at_once():
                verb: Callable[[Namespace], None] = resolve_name(options.verb)
            verb(options)
    except FedhmError as error:
        return _failed(str(error), 1)
    except KeyboardInterrupt:
        return _failed(f"stopped{_resume_hint(options)}", STOPPED, before="\n")
    except OSError as error:  # a full disk, a folder that may not be written
        return _failed(f"{os_error_sentence(error)}{_resume_hint(options)}", 1)
    except UnicodeEncodeError as error:  # of a path in a config, in an argument or in the environment
        line = error.object[: error.start].rpartition("\n")[2] + error.object[error.start :].partition("\n")[0]
        shown = line.encode(errors="surrogateescape").decode(errors="backslashreplace").strip()
        return _failed(f"there is a name that is not in UTF-8: {shown}{_resume_hint(options)}", 1)
    return 0


def _failed(sentence: str, code: int, before: str = "") -> int:
    print(f"{before}fedhm: {printable_lines(sentence)}", file=sys.stderr)
    return code


def _resume_hint(options: Namespace) -> str:
    said: str = getattr(options, "resume_hint", "")
    return said
