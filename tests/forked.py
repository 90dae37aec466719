"""`fedhm`, and scripts, as processes that are forks of the tests': they begin with torch and all that imported.

Importing takes others seconds. Each is a process like any other to whoever started it, with signals, streams and a
session of its own. Some tests start the command itself, since its beginning is what they are about.
"""

import gc
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from fedhm.cli import main

TESTS = Path(__file__).parent
FIGURES = {
    "fedhm.report.plots.save_run_plots": lambda *_: [],
    "fedhm.report.page.save_page": lambda _, folder: folder / "report.md",  # a file that is there
}  # what draws a single run's report, and what nothing is drawn by


def fedhm(
    arguments: Sequence[str], begin: Callable[[], object] = lambda: None, **streams: Any
) -> subprocess.Popen[Any]:
    """Start `fedhm ARGUMENTS` after `begin`, which is called in its process; `streams` are those of `Popen`."""

    def run() -> object:
        begin()
        return main()

    return _fork(["fedhm", *arguments], run, **streams)


def script(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python PATH ARGUMENTS` to its end, where it finds no modules of the tests."""

    def run() -> None:
        sys.path[:] = [str(path.parent), *(each for each in sys.path if TESTS not in (Path(each), *Path(each).parents))]
        _warn_as_usual()
        runpy.run_path(str(path), run_name="__main__")

    return _finished(_fork([str(path), *arguments], run, **_CAPTURED))


def code(text: str) -> subprocess.CompletedProcess[str]:
    """Run `python -c TEXT` to its end."""

    def run() -> None:
        _warn_as_usual()
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})

    return _finished(_fork(["-c"], run, **_CAPTURED))


def _warn_as_usual() -> None:
    """Have warnings as Python has them: in tests they are errors."""
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


_CAPTURED: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def _finished(process: "subprocess.Popen[str]") -> subprocess.CompletedProcess[str]:
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _fork(command: Sequence[str], run: Callable[[], object], **streams: Any) -> subprocess.Popen[Any]:
    def become() -> None:
        """Never returns: the command that Popen is given is not run."""
        ended: object = 1
        try:
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # as for another program; among them what Popen waits for
            gc.enable()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            sys.argv = list(command)
            ended = run()
        except SystemExit as stop:
            ended = stop.code
            if isinstance(ended, str):
                print(ended, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(ended if isinstance(ended, int) else int(ended is not None))

    return subprocess.Popen(list(command), preexec_fn=become, **streams)  # noqa: PLW1509


def with_commands_for_runs() -> None:
    """Have a comparison that is a fork start its runs as it does by itself, whatever tests have in place of that."""
    import_module("fedhm.compare.execute").subprocess = subprocess


def without_figures() -> None:
    """Leave out the figures of a run's report, for good: in a fork."""
    for name, nothing in FIGURES.items():
        module, _, function = name.rpartition(".")
        setattr(import_module(module), function, nothing)


def run_of_a_comparison(command: Sequence[str], **streams: Any) -> subprocess.Popen[Any]:
    """Start, in place of `subprocess.Popen`, what a comparison runs: `python -m fedhm ARGUMENTS`."""
    interpreter, flag, module, *arguments = command
    assert (interpreter, flag, module) == (sys.executable, "-m", "fedhm")
    return fedhm(arguments, without_figures, **streams)
