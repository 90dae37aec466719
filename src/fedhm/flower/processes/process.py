"""One of Flower's processes, together with all processes that it starts: its log, its state and its end."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from shutil import which
from typing import Self

from fedhm.errors import FedhmError
from fedhm.flower.processes.secrets import OWNER_ONLY_UMASK, owner_only_files
from fedhm.machine.extras import how_to_install
from fedhm.machine.printable import printable
from fedhm.machine.process import utf8_output

HOST = "127.0.0.1"
STOP_TIMEOUT = 15.0  # seconds; longer than the supervisor takes
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_UNREMARKABLE = re.compile(
    r"INFO\b|\S+Z INFO\b|For more information|The SuperNode could not establish|WARNING.*--insecure"
)
_RETRY = re.compile(r"WARNING.*Connection attempt failed, retrying")


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's commands: without telemetry, and with the commands beside this Python first.

    Without `no_proxy` they would use a proxy even for this machine.
    """
    direct = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), HOST, "localhost"]))
    return {
        **utf8_output(),
        "FLWR_HOME": str(home.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; the default delays every message by up to one
        "RAY_USAGE_STATS_ENABLED": "0",
        "no_proxy": direct,
        "NO_PROXY": direct,
        "PATH": os.pathsep.join(
            [str(replaced_commands(home)), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        ),
    }


def replaced_commands(home: Path) -> Path:
    """Return the folder of the commands that replace Flower's own, for us and for Flower's processes."""
    return home.absolute() / "bin"


def executable(name: str, home: Path) -> str:
    found = which(name, path=environment(home)["PATH"])
    if found is None:
        raise FedhmError(f"Flower's command '{name}' is not installed: {how_to_install('flower')}")
    return found


def free_ports(count: int) -> list[int]:
    """Return free ports of the loopback, all different: none is released before the last is known."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in sockets]


def check_port(port: int) -> None:
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        raise FedhmError(f"port {port} cannot be used: {os.strerror(error.errno or 0)}") from None


class Process:
    """A command under a supervisor, started at once. As a context manager it ends with the context.

    linger         how many seconds it outlives this process; see `supervisor.py`
    inherited_fds  file descriptors that stay open in it

    Only the owner can read the files that it writes.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        home: Path,
        log: Path,
        linger: float = 0.0,
        inherited_fds: Sequence[int] = (),
        extra_environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.command, self.log = name, list(command), log
        script = Path(__file__).with_name("supervisor.py")
        supervisor = [sys.executable, "-I", str(script), str(os.getpid()), str(linger), "--"]
        found = executable(self.command[0], home)
        with owner_only_files():
            log.parent.mkdir(parents=True, exist_ok=True)
            opened = log.open("wb")
        with opened as file:
            self._supervisor = subprocess.Popen(
                [*supervisor, found, *self.command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**environment(home), **(extra_environment or {})},
                umask=OWNER_ONLY_UMASK,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the command
                pass_fds=inherited_fds,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        return self._supervisor.poll() is None

    @property
    def last_log_line(self) -> str:
        """Return the last line of the log that explains why the process ended."""
        text = _COLOUR.sub("", self.log.read_text(encoding="utf-8", errors="replace")) if self.log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        remarkable = [line for line in lines if not _UNREMARKABLE.match(line)]
        # a node's own processes may still try to reach it after it has logged why it ends
        final = [line for line in remarkable if not _RETRY.match(line)]
        return printable((final or remarkable or lines or ["(nothing)"])[-1])

    def check(self) -> None:
        if not self.alive:
            raise FedhmError(f"{self.name} ended: {self.last_log_line} ({self.log})")

    def wait_for_port(self, port: int, seconds: float = 90.0) -> None:
        until = time.monotonic() + seconds
        while not _listens(port):
            self.check()
            if time.monotonic() > until:
                raise FedhmError(
                    f"{self.name} did not answer within {seconds:.0f} seconds: {self.last_log_line} ({self.log})"
                )
            time.sleep(0.1)

    def terminate(self) -> None:
        """Ask the process to end, without waiting for it."""
        if self.alive:
            self._supervisor.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the process, and wait until it has ended."""
        self.terminate()
        try:
            self._supervisor.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True
