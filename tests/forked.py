"""`fedhm` as a process that is a fork of the tests': it begins with everything imported, which takes others seconds.

It is a process like any other to whoever started it, with signals, streams and a session of its own. Some tests start
the command itself, since its beginning is what they are about.
"""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from fedhm.cli import main

FIGURES = {
    "fedhm.report.plots.save_plots": lambda *_: [],
    "fedhm.report.energy.save_collapse_plot": lambda *_: None,
    "fedhm.report.epsilon.save_epsilon_plot": lambda *_: None,
    "fedhm.report.client_plot.save_client_plots": lambda *_: [],
    "fedhm.report.page.write.save_page": lambda _, folder: folder / "report.html",
}  # what draws a single run's report, and what nothing is drawn by


def fedhm(
    arguments: Sequence[str], begin: Callable[[], object] = lambda: None, **streams: Any
) -> subprocess.Popen[Any]:
    """Start `fedhm ARGUMENTS` after `begin`, which is called in its process; `streams` are those of `Popen`."""

    def become() -> None:
        """Never returns: the command that Popen is given is not run."""
        code = 1
        try:
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # as for another program; among them what Popen waits for
            gc.enable()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            sys.argv = ["fedhm", *arguments]
            begin()
            code = main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    return subprocess.Popen(["fedhm", *arguments], preexec_fn=become, **streams)  # noqa: PLW1509


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
