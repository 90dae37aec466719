"""Flower's command `flwr`, answered by a process that has it imported.

Importing takes the command longer than what it does, and a federation that comes up or a run that is watched asks it
again and again. Here one process imports, and forks for every command. It is no child of whoever asks, so nobody has to
end it: it ends with the process that started it, and when it has not been asked for a while.

This file is run by its path, since importing its package would take time, too. Elsewhere than on Linux, where forking
is not safe or not there, the command itself is run.
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

IDLE = 20.0  # seconds without a question after which the process ends
LOOK = 0.02  # seconds between two looks at a command
LONGEST = 65536  # bytes of a command
BEGUN = b"begun"

_asked: dict[tuple[int, frozenset[tuple[str, str]]], socket.socket] = {}  # one at most: by who asks, and what is set


def forget() -> None:
    """End the process that was asked last, if there is one."""
    for (owner, _), told in _asked.items():
        told.close() if owner == os.getpid() else told.detach()  # in a fork, its number may be another file's by now
    _asked.clear()


atexit.register(forget)


class NeverBegunError(Exception):
    """The process was gone before it began with the command: it can be asked again."""


def is_ready(command: str) -> bool:
    """Tell whether a command is the one that is answered here: that of Flower as it is installed for this Python."""
    return sys.platform == "linux" and Path(command) == Path(sys.executable).with_name("flwr")


def answered(
    arguments: Sequence[str], environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run `flwr ARGUMENTS` as `subprocess.run` does; raise TimeoutError if it takes longer than that."""
    try:
        return _answered(arguments, environment, seconds)
    except NeverBegunError:  # it has just ended, since it was not asked for long
        return _answered(arguments, environment, seconds)


def _answered(
    arguments: Sequence[str], environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    key = (os.getpid(), frozenset(environment.items()))
    told = _asked.pop(key, None) or _start(environment)
    forget()
    try:
        with TemporaryFile() as out, TemporaryFile() as err:
            told.settimeout(seconds)
            code = _code(told, arguments, (out.fileno(), err.fileno()))
            said = [_read(file) for file in (out, err)]
    except BaseException:
        told.close()  # which ends the process, and the command that it is at
        raise
    _asked[key] = told
    return subprocess.CompletedProcess(["flwr", *arguments], code, *said)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _code(told: socket.socket, arguments: Sequence[str], streams: Sequence[int]) -> int:
    try:
        socket.send_fds(told, [json.dumps([str(Path.cwd()), *arguments]).encode()], streams)
        if told.recv(LONGEST) != BEGUN:
            raise NeverBegunError
    except ConnectionError:
        raise NeverBegunError from None
    ended = told.recv(LONGEST)
    return int(ended) if ended else -signal.SIGKILL


def _start(environment: Mapping[str, str]) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        nothing = subprocess.DEVNULL
        subprocess.run(
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            start_new_session=True,  # Ctrl-C is for who asks
            check=True,
        )
    return ours


def _serve(told: socket.socket, run: Callable[[], Any]) -> None:
    """Fork for every command until nobody is there to ask."""
    while select.select([told], [], [], IDLE)[0]:
        message, streams, _, _ = socket.recv_fds(told, LONGEST, 2)
        if not message:
            return
        told.send(BEGUN)
        child = os.fork()
        if child == 0:
            told.close()
            for number, stream in enumerate(streams, start=1):
                os.dup2(stream, number)
            place, *arguments = json.loads(message)
            os.chdir(place)
            sys.argv = ["flwr", *arguments]
            run_and_exit(run)
        for stream in streams:
            os.close(stream)
        told.send(str(_ended(child, told)).encode())


def _ended(child: int, told: socket.socket) -> int:
    """Wait for a command; end it if nobody waits for its answer any more."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if select.select([told], [], [], LOOK)[0]:
            os.kill(child, signal.SIGKILL)
            os._exit(1)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # so that the process is nobody's child
    _serve(socket.socket(fileno=int(sys.argv[1])), import_module("flwr.cli.app").app)
