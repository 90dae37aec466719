"""One of Flower's processes, with all that it starts: its log, whether it lives, what it last said, its end."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from fedhm.errors import FedhmError
from fedhm.flower.processes.secrets import OWNERS_ONLY, private_files
from fedhm.machine.printable import printable

HOST = "127.0.0.1"
ENDING = 15.0  # seconds; more than the supervisor needs
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_UNREMARKABLE = re.compile(
    r"INFO\b|\S+Z INFO\b|For more information|The SuperNode could not establish|WARNING.*--insecure"
)
_RETRIES = re.compile(r"WARNING.*Connection attempt failed, retrying")


def check_installed() -> None:
    if find_spec("flwr") is None or find_spec("cryptography") is None:
        raise FedhmError("Flower is not installed: pip install 'fedhm[flower]'")


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's commands: they report nothing to anyone, and are found beside this Python.

    Without `no_proxy` they would ask a proxy even for this machine.
    """
    direct = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), HOST, "localhost"]))
    return {
        **os.environ,
        "FLWR_HOME": str(home.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; every message would wait for up to one
        "RAY_USAGE_STATS_ENABLED": "0",
        "no_proxy": direct,
        "NO_PROXY": direct,
        "PATH": os.pathsep.join(
            [str(own_commands(home)), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        ),
    }


def own_commands(home: Path) -> Path:
    """Return the folder of the commands that are run in place of Flower's own, by us and by Flower."""
    return home.absolute() / "bin"


def executable(name: str, home: Path) -> str:
    found = which(name, path=environment(home)["PATH"])
    if found is None:
        raise FedhmError(f"Flower's command '{name}' is not installed: pip install 'fedhm[flower]'")
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
    """A command that runs under a supervisor; `supervisor.py` explains `linger`. What it writes is its owner's only."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        home: Path,
        log: Path,
        linger: float = 0.0,
        keep_open: Sequence[int] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.command, self.log = name, list(command), log
        supervisor = [
            sys.executable,
            "-I",
            str(Path(__file__).with_name("supervisor.py")),
            str(os.getpid()),
            str(linger),
            "--",
        ]
        found = executable(self.command[0], home)
        with private_files():
            log.parent.mkdir(parents=True, exist_ok=True)
            opened = log.open("wb")
        with opened as file:
            self._supervisor = subprocess.Popen(
                [*supervisor, found, *self.command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**environment(home), **(settings or {})},
                umask=OWNERS_ONLY,
                start_new_session=True,  # Ctrl-C is for us, who then end it
                pass_fds=keep_open,
            )

    @property
    def alive(self) -> bool:
        return self._supervisor.poll() is None

    @property
    def last_words(self) -> str:
        """Return the last line of the process's log that tells why it ended."""
        text = _COLOUR.sub("", self.log.read_text(errors="replace")) if self.log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        told = [line for line in lines if not _UNREMARKABLE.match(line)]
        # a node's own processes may still ask for it when it has said why it ends
        final = [line for line in told if not _RETRIES.match(line)]
        return printable((final or told or lines or ["(nothing)"])[-1])

    def check(self) -> None:
        if not self.alive:
            raise FedhmError(f"{self.name} ended: {self.last_words} ({self.log})")

    def wait_for_port(self, port: int, seconds: float = 90.0) -> None:
        until = time.monotonic() + seconds
        while not _listens(port):
            self.check()
            if time.monotonic() > until:
                raise FedhmError(
                    f"{self.name} did not answer within {seconds:.0f} seconds: {self.last_words} ({self.log})"
                )
            time.sleep(0.1)

    def tell_to_end(self) -> None:
        if self.alive:
            self._supervisor.send_signal(signal.SIGTERM)

    def end(self) -> None:
        self.tell_to_end()
        try:
            self._supervisor.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()


@contextmanager
def ended_afterwards(process: Process) -> Iterator[Process]:
    try:
        yield process
    finally:
        process.end()


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True
