"""Flower's command `flwr`, run by a resident process that has it imported.

Importing `flwr` takes longer than the command itself. A federation that comes up, or a run that is followed, calls it
again and again: `fedhm flower up` takes a third less time with the resident process. That process imports once, and
forks for every command. It is no child of the caller, so nobody has to end it: it ends with the process that started
it, and after a while without commands.

This file is run by its path, since importing its package would take time too. Forking is safe on Linux only: elsewhere
the command itself is run.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from fedhm.machine.process import run_and_exit

IDLE = 20.0  # seconds without a command after which the process ends
POLL = 0.02  # seconds between two looks at a command
LARGEST_MESSAGE = 65536  # bytes
STARTED = b"started"

# At most one connection, by the calling process and the environment of its commands.
_connections: dict[tuple[int, frozenset[tuple[str, str]]], socket.socket] = {}


def end_resident() -> None:
    """End the resident process, if there is one."""
    for (owner, _), connection in _connections.items():
        # a fork must not close the descriptor: its number may belong to another file by now
        connection.close() if owner == os.getpid() else connection.detach()
    _connections.clear()


atexit.register(end_resident)


class NotStartedError(Exception):
    """The resident process was gone before it started the command: the command can be tried again."""


def can_run(command: str) -> bool:
    """Tell whether a command is the `flwr` that is installed for this Python, on a system that can fork."""
    return sys.platform == "linux" and Path(command) == Path(sys.executable).with_name("flwr")


def run_resident(
    arguments: Sequence[str], environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run `flwr ARGUMENTS` as `subprocess.run` does; raise TimeoutError if it takes longer than `seconds`."""
    try:
        return _run_once(arguments, environment, seconds)
    except NotStartedError:  # the process has just ended, after a while without commands
        return _run_once(arguments, environment, seconds)


def _run_once(
    arguments: Sequence[str], environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    key = (os.getpid(), frozenset(environment.items()))
    connection = _connections.pop(key, None) or _start(environment)
    end_resident()
    try:
        with TemporaryFile() as out, TemporaryFile() as err:
            connection.settimeout(seconds)
            code = _exit_code(connection, arguments, (out.fileno(), err.fileno()))
            printed = [_read(file) for file in (out, err)]
    except BaseException:
        connection.close()  # this ends the process, and the command that it runs
        raise
    _connections[key] = connection
    return subprocess.CompletedProcess(["flwr", *arguments], code, *printed)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _exit_code(connection: socket.socket, arguments: Sequence[str], streams: Sequence[int]) -> int:
    try:
        socket.send_fds(connection, [json.dumps([str(Path.cwd()), *arguments]).encode()], streams)
        if connection.recv(LARGEST_MESSAGE) != STARTED:
            raise NotStartedError
    except ConnectionError:
        raise NotStartedError from None
    code = connection.recv(LARGEST_MESSAGE)
    return int(code) if code else -signal.SIGKILL


def _start(environment: Mapping[str, str]) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.run(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the caller
            check=True,
        )
    return ours


def _serve(connection: socket.socket, run: Callable[[], Any]) -> None:
    """Fork for every command until the caller is gone."""
    while select.select([connection], [], [], IDLE)[0]:
        message, streams, _, _ = socket.recv_fds(connection, LARGEST_MESSAGE, 2)
        if not message:
            return
        connection.send(STARTED)
        child = os.fork()
        if child == 0:
            connection.close()
            for number, stream in enumerate(streams, start=1):
                os.dup2(stream, number)
            folder, *arguments = json.loads(message)
            os.chdir(folder)
            sys.argv = ["flwr", *arguments]
            run_and_exit(run)
        for stream in streams:
            os.close(stream)
        connection.send(str(_wait(child, connection)).encode())


def _wait(child: int, connection: socket.socket) -> int:
    """Wait for a command; end it if the caller no longer waits for it."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if select.select([connection], [], [], POLL)[0]:
            os.kill(child, signal.SIGKILL)
            os._exit(1)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # so that the process is nobody's child
    _serve(socket.socket(fileno=int(sys.argv[1])), import_module("flwr.cli.app").app)
