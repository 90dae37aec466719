"""Flower's executor (`flower-superexec`), with processes that begin with Flower and torch imported.

Flower starts a process for every message to a node. Importing torch takes that process seconds, often longer than
training. Here one process does the imports when the first command arrives, and every process that the executor would
start is a fork of it. The fork server does nothing else: it has no connection, computes nothing, and ends with the
executor.

This file is run by its path, `python -P forking_executor.py flower-superexec …`: importing its package would take
seconds. Outside Linux, where forking is unsafe or missing, it runs Flower's own executor.
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

# Imported for the processes of each command. These are this library's apps; users' apps import them, too.
PRELOADED = {
    "flwr-clientapp": ["fedhm.flower.clients", "fedhm.assembly"],
    "flwr-serverapp": ["fedhm.flower.server", "fedhm.assembly"],
}
# Other slow imports of apps: the fork server imports one of these after a process has done so
LEARNED = ("sklearn.datasets", "pandas", "torchvision", "datasets", "transformers", "peft")
SET_NAME = 15  # of prctl(2)
LONGEST_COMMAND = 65536  # bytes


class ForkServer:
    """A process that forks for every command that it receives."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            _set_process_name("fedhm-forks")
            _serve(theirs)
        theirs.close()
        self._requests = ours

    def start(self, command: Sequence[str], stdout: int | None = None, stderr: int | None = None) -> None:  # noqa: ARG002
        """Start a command. Stands in for `subprocess.Popen`, as Flower calls it: silent, or writing to the same log."""
        self._requests.send(json.dumps([stdout == subprocess.DEVNULL, *command]).encode())


def _serve(requests: socket.socket) -> None:
    """Fork for every request until the executor has ended. Returns in the forked processes only."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for processes that do something; this one ends with them
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for exit codes
    learned, reported = os.pipe()
    os.set_blocking(learned, False)
    while request := requests.recv(LONGEST_COMMAND):
        silent, *words = json.loads(request)
        run = _import_command(words[0])
        with suppress(BlockingIOError):  # no process has reported an import
            for name in {*os.read(learned, LONGEST_COMMAND).decode().split()} & {*LEARNED}:
                _try_to_import(name)
        gc.freeze()  # a fork's collector then leaves these objects alone, so that their memory is not copied
        if os.fork() == 0:
            requests.close()
            atexit.register(_report_imports, reported)
            _become(words, run, silent)
    os._exit(0)


def _import_command(name: str) -> Callable[[], Any] | None:
    """Return the function of a command, after importing all that it needs; None for commands not known here."""
    for module in PRELOADED.get(name, ()):
        _try_to_import(module)
    found = list(entry_points(group="console_scripts", name=name))
    try:
        return found[0].load() if found and name in PRELOADED else None
    except Exception:  # the command itself will say why
        return None


def _try_to_import(module: str) -> None:
    if module not in sys.modules:
        with suppress(Exception):  # a process that needs the module will say so
            import_module(module)


def _report_imports(pipe: int) -> None:
    """Tell the fork server, which belongs to the same user, what the next process is likely to import."""
    if found := [name for name in LEARNED if name in sys.modules]:
        with suppress(OSError):
            os.write(pipe, f"{' '.join(found)} ".encode())


def _become(words: list[str], run: Callable[[], Any] | None, silent: bool) -> NoReturn:
    """Become the process of a command, and end as the command does."""
    if silent:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if run is None:
        os.execvp(words[0], words)
    _set_process_name(words[0])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # otherwise every fork would draw the same numbers
    sys.argv = words
    run_and_exit(run)


def _set_process_name(name: str) -> None:
    """Have `ps` and `top` show this process by another name than its parent's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    command: Any = import_module("flwr.supercore.cli.flower_superexec")
    if sys.platform == "linux":
        executor: Any = import_module("flwr.supercore.superexec.executor.subprocess_executor")
        executor.subprocess = SimpleNamespace(Popen=ForkServer().start, DEVNULL=subprocess.DEVNULL)
    command.flower_superexec()
