"""Flower's executor, whose processes begin with Flower and torch imported.

Flower starts a process for every message that a node gets, and importing takes it seconds, often longer than training.
Here one process imports, once there is something to do, and every process that the executor would start is a fork of
it. That process does nothing else: it has no connection, computes nothing, and ends with the executor.

This file is run by its path, `python -P ready_executor.py flower-superexec …`, since importing its package would take
seconds. Elsewhere than on Linux, where forking is not safe or not there, Flower's own executor is run.
"""

import atexit
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any, NoReturn

from fedhm.machine.process import run_and_exit

# What the processes of each command import: the apps of this library, for a user's app too. A missing one is no harm.
NEEDED = {
    "flwr-clientapp": ["fedhm.flower.clients", "fedhm.assembly"],
    "flwr-serverapp": ["fedhm.flower.server", "fedhm.assembly"],
}
# What else apps import that takes seconds: imported here, too, once a process was seen to have done so
OFTEN = ("sklearn.datasets", "pandas", "torchvision", "datasets", "transformers", "peft")
SET_NAME = 15  # of prctl(2)
LONGEST = 65536  # bytes of a command


class Forks:
    """A process that forks for every command which it is told."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            _be_called("fedhm-forks")
            _fork_for_each(theirs)
        theirs.close()
        self._told = ours

    def start(self, command: Sequence[str], stdout: int | None = None, stderr: int | None = None) -> None:  # noqa: ARG002
        """Start a command as Flower does with `subprocess.Popen`, which says nothing or writes into the same log."""
        self._told.send(json.dumps([stdout == subprocess.DEVNULL, *command]).encode())


def _fork_for_each(told: socket.socket) -> None:
    """Fork for every command until nobody is there to tell one. Does not return, but in the forked processes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # for those who do something; this one ends with them
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    seen, by_others = os.pipe()
    os.set_blocking(seen, False)
    while command := told.recv(LONGEST):
        silent, *words = json.loads(command)
        run = _imported(words[0])
        with suppress(BlockingIOError):  # nobody has imported anything
            for name in {*os.read(seen, LONGEST).decode().split()} & {*OFTEN}:
                _try_to_import(name)
        gc.freeze()  # what a fork's collector does not look at is not copied for it
        if os.fork() == 0:
            told.close()
            atexit.register(_tell_what_was_imported, by_others)
            _become(words, run, silent)
    os._exit(0)


def _imported(name: str) -> Callable[[], Any] | None:
    """Return what a command runs, all that it needs being imported; None if it is not known here."""
    for module in NEEDED.get(name, ()):
        _try_to_import(module)
    found = list(entry_points(group="console_scripts", name=name))
    try:
        return found[0].load() if found and name in NEEDED else None
    except Exception:  # the command itself will say why
        return None


def _try_to_import(module: str) -> None:
    if module not in sys.modules:
        with suppress(Exception):  # whoever needs it will say so
            import_module(module)


def _tell_what_was_imported(pipe: int) -> None:
    """Tell the process that forks, which is of the same user, what the next one is likely to need."""
    if found := [name for name in OFTEN if name in sys.modules]:
        with suppress(OSError):
            os.write(pipe, f"{' '.join(found)} ".encode())


def _become(words: list[str], run: Callable[[], Any] | None, silent: bool) -> NoReturn:
    """Be the process that was asked for. Ends as the command does."""
    if silent:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if run is None:
        os.execvp(words[0], words)
    _be_called(words[0])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # of which every fork would draw the same numbers
    sys.argv = words
    run_and_exit(run)


def _be_called(name: str) -> None:
    """Have `ps` and `top` show this process by another name than that of its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    command: Any = import_module("flwr.supercore.cli.flower_superexec")
    if sys.platform == "linux":
        executor: Any = import_module("flwr.supercore.superexec.executor.subprocess_executor")
        executor.subprocess = SimpleNamespace(Popen=Forks().start, DEVNULL=subprocess.DEVNULL)
    command.flower_superexec()
