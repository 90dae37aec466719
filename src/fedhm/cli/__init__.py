"""The command line: `fedhm VERB`. One file a verb, with its arguments and its action; `make_parser` lists them.

A command line is checked before anything heavy is imported, since torch alone takes seconds. So verb files import heavy
modules inside their actions only. A new verb is a new file, and a line in `make_parser`.
"""

import argparse
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

from fedhm.cli import check_device, compare, data, export, fit, flower, paper, presets, profile, report, run, verify
from fedhm.errors import FedhmError, show_warnings
from fedhm.machine.files import os_error_sentence
from fedhm.machine.memory import (
    ROUND_ADVICE,
    NotEnoughMemoryError,
    check_room_for_torch,
    memory_errors,
    prepare_for_little_memory,
)
from fedhm.machine.printable import accept_any_text, printable_lines
from fedhm.machine.process import run_and_exit

__all__ = ["command", "exit_on_interrupt", "main", "make_parser"]

INTERRUPTED = 130  # the exit code after Ctrl-C


def command() -> NoReturn:
    """Be the command `fedhm`."""
    accept_any_text(sys.stdout, sys.stderr)
    prepare_for_little_memory()
    run_and_exit(main)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs.

    Each verb sets two defaults: `action`, a function of the options, and `imports`, the heavy module that it needs.
    """
    parser: argparse.ArgumentParser = _Parser(
        prog="fedhm",
        description="Federated learning for devices that are not alike: every client trains the largest "
        "low-rank version of one model that it can afford.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for add_verb in (
        run.add_run,
        run.add_resume,
        compare.add_compare,
        paper.add_paper,
        report.add_sizes,
        fit.add_fit,
        fit.add_plan,
        profile.add_profile,
        check_device.add_check_device,
        report.add_report,
        report.add_watch,
        verify.add_verify,
        export.add_export,
        presets.add_presets,
        presets.add_init,
        data.add_data,
        flower.add_flower,
    ):
        add_verb(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute a command line and return the exit code; an error is one sentence on stderr."""
    options = argparse.Namespace()
    try:
        with warnings.catch_warnings():
            show_warnings(lambda sentence: print(f"fedhm: {sentence}", file=sys.stderr))
            make_parser().parse_args(arguments, options)
            options.command = shlex.join(["fedhm", *(sys.argv[1:] if arguments is None else arguments)])
            with memory_errors("to load PyTorch and other packages", "close other programs"), exit_on_interrupt():
                if options.imports:
                    check_room_for_torch()
                    import_module(options.imports)
            with memory_errors("to go on", ROUND_ADVICE):
                options.action(options)
    except NotEnoughMemoryError as error:
        return _failed(f"{error}{_resume_hint(options)}", 1)
    except FedhmError as error:
        return _failed(str(error), 1)
    except KeyboardInterrupt:
        return _failed(f"stopped{_resume_hint(options)}", INTERRUPTED, before="\n")
    except OSError as error:  # such as a full disk, or a folder without write permission
        return _failed(f"{os_error_sentence(error)}{_resume_hint(options)}", 1)
    except UnicodeEncodeError as error:  # a path in a config, in an argument or in the environment
        line = error.object[: error.start].rpartition("\n")[2] + error.object[error.start :].partition("\n")[0]
        shown = line.encode(errors="surrogateescape").decode(errors="backslashreplace").strip()
        return _failed(f"there is a name that is not in UTF-8: {shown}{_resume_hint(options)}", 1)
    return 0


@contextmanager
def exit_on_interrupt(clean_up: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let Ctrl-C end the process at once, after `clean_up`: for work that leaves nothing half done on disk.

    An exception would be lost in imports, and in callbacks of weak references, of which torch has many.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield  # another handler is in charge
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        clean_up()
        with suppress(RuntimeError, OSError):  # the signal may interrupt a write to stdout
            sys.stdout.flush()
        print("\nfedhm: stopped", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _failed(sentence: str, code: int, before: str = "") -> int:
    print(f"{before}fedhm: {printable_lines(sentence)}", file=sys.stderr)
    return code


def _resume_hint(options: argparse.Namespace) -> str:
    hint: str = getattr(options, "resume_hint", "")
    return hint


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say how settings are written, if some stand where --set was left out."""
        unknown, settings = message.partition("unrecognized arguments: ")[1:]
        if unknown and all("=" in word and not word.startswith("-") for word in settings.split()):
            message += f" (settings follow --set: --set {settings})"
        super().error(message)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version  # takes longer than all other imports of a command line

        print(f"fedhm {version('fedhm')}")
        parser.exit()
