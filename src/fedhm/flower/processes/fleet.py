"""The folder of a federation on this machine: what lies where, whether it runs, and how to connect to it."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import lock_descriptor

from fedhm.errors import FedhmError
from fedhm.flower.processes.process import HOST, Process, check_port, ended_afterwards, free_ports
from fedhm.flower.processes.secrets import Secrets, ensure_certificates, ensure_client_key, private_files
from fedhm.flower.processes.superlink import (
    EXECUTOR,
    GOODBYES,
    Connection,
    ask,
    guarded,
    have_ready_executors,
    named_connection,
    superexec_command,
    superlink_command,
    supernode_command,
    write_connection,
)
from fedhm.machine.files import write_atomically
from fedhm.machine.printable import quoted_command

NAME = "federation"  # of the connection
CLEARING = 30.0  # seconds until the processes of a federation that was killed are gone


@dataclass(frozen=True)
class FleetFolder:
    path: Path  # absolute

    @property
    def connection(self) -> Connection:
        return Connection(self.path / "flower", NAME)

    @property
    def certificates(self) -> Path:
        return self.path / "certificates"

    @property
    def database(self) -> Path:
        return self.path / "state.db"

    def key(self, client: int) -> Path:
        return self.path / "keys" / f"client-{client}"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    @property
    def announcement(self) -> Path:
        """Return the path of a file that exists while the federation is up."""
        return self.path / "connection.json"

    @property
    def runs(self) -> bool:
        try:
            with (self.path / "lock").open() as file:
                return not lock_descriptor(file.fileno(), blocking=False) and _lives(file.read())
        except FileNotFoundError:
            return False

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the lock of the one federation that may run here, and yield its descriptor.

        The federation's processes inherit it, so that the lock is free once the last of them has ended. A FileLock
        would keep it to itself and close it with this process, while a SuperLink may still wait for its SuperNodes.
        """
        with _opened(self.path / "lock") as file:
            until = time.monotonic() + CLEARING
            while not lock_descriptor(file.fileno(), blocking=False):
                file.seek(0)
                if _lives(file.read()) or time.monotonic() > until:
                    raise FedhmError(f"a federation runs in {self.path} already; end it, or name another --folder")
                time.sleep(0.2)
            file.seek(0)
            file.truncate()
            file.write(json.dumps({"pid": os.getpid()}))
            file.flush()
            self.announcement.unlink(missing_ok=True)  # of one that was killed
            (self.path / ".gitignore").write_text("*\n")  # there are private keys in it
            try:
                yield file.fileno()
            finally:
                self.announcement.unlink(missing_ok=True)

    def announce(self, address: str, clients: int) -> None:
        about = {"address": address, "clients": clients, "home": "flower", "name": NAME}
        write_atomically(self.announcement, json.dumps(about, indent=2) + "\n")


def connection_of(superlink: str) -> Connection:
    """Return the connection of `superlink`: the folder of a `fedhm flower up`, or the name of a user's connection."""
    folder = FleetFolder(Path(superlink).absolute())
    if not (folder.path / "lock").exists():
        return named_connection(superlink)
    if not folder.runs:
        raise FedhmError(
            f"the federation in {superlink} is not running; start it with "
            f"{quoted_command('fedhm', 'flower', 'up', '--folder', superlink)}"
        )
    if not folder.announcement.exists():
        raise FedhmError(f"the federation in {superlink} is still coming up; try again in some seconds")
    return folder.connection


def _opened(path: Path) -> IO[str]:
    try:
        with private_files():
            ours = path.exists() or not path.parent.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            if ours:  # one that an earlier version made was open to everybody
                path.parent.chmod(0o700)
            return path.open("a+")
    except OSError as error:
        raise FedhmError(f"cannot make the folder {path.parent}: {error.strerror}") from None


def _lives(owner: str) -> bool:
    """Tell whether the process that a lock names is alive."""
    try:
        os.kill(int(json.loads(owner)["pid"]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


# A whole federation on this machine: a SuperLink and its SuperNodes, which come up and end together.

FORGETTING = 90.0  # seconds to wait until a SuperLink notices a SuperNode that ended without disconnecting; it takes 60
COMING_UP = 120.0  # seconds for all SuperNodes, and two more for each

PAUSE = 2.0  # seconds between two looks: each starts a command that takes more than one, which the SuperNodes lack

Report = Callable[[str], None]


class Fleet:
    def __init__(self, folder: FleetFolder, port: int, secure: bool, lock: int) -> None:
        self.folder, self.address, self.secure, self.lock = folder, f"{HOST}:{port}", secure, lock
        self.commands: list[list[str]] = []  # that a user could type to get the same
        self.nodes: list[Process] = []
        self._buried: set[str] = set()
        if secure:
            ensure_certificates(folder.certificates)
        authority = folder.certificates / "ca.crt" if secure else None
        write_connection(folder.connection, port, authority)
        certificates = folder.certificates if secure else None
        self._used_before = folder.database.exists()
        secrets = Secrets(folder.connection.home)
        secrets.make(self.address)
        have_ready_executors(folder.connection.home)
        command = superlink_command(port, certificates, ["--database", str(folder.database)])
        self.commands.append(command)  # by itself it starts an executor, and takes runs from everybody
        self.superlink = self._process("the SuperLink", guarded(command, secrets), "superlink")
        self.executor = self._process(EXECUTOR, superexec_command(port, certificates, secrets), "executor")

    def _process(self, name: str, command: list[str], log: str) -> Process:
        linger = GOODBYES if log == "superlink" else 0.0
        return Process(name, command, self.folder.connection.home, self.folder.log(log), linger, [self.lock])

    def wait_for_superlink(self, port: int, report: Report) -> None:
        self.superlink.wait_for_port(port)
        until = time.monotonic() + FORGETTING
        while self._used_before and self._online():
            self.superlink.check()
            if time.monotonic() > until:
                raise FedhmError(f"SuperNodes of an earlier federation are still connected to {self.address}")
            report("waiting until Flower notices that the last federation here was killed (up to a minute)")
            time.sleep(1)

    def add(self, client: int, port: int, node_config: str) -> None:
        key = self.folder.key(client)
        authority = self.folder.certificates / "ca.crt" if self.secure else None
        if self.secure:
            ensure_client_key(key)
            self._register(f"{key}.pub")
        command = supernode_command(self.address, authority, key, port, node_config)
        self.commands.append(command)
        self.nodes.append(self._process(f"SuperNode {client}", command, f"client-{client}"))

    def _register(self, public_key: str) -> None:
        self.commands.append(["flwr", "supernode", "register", public_key, self.folder.connection.name])
        try:
            ask(self.folder.connection, "supernode", "register", public_key)
        except FedhmError as error:
            if "already in use" not in str(error):  # registered by an earlier federation in this folder
                raise

    def wait_for_nodes(self, report: Report) -> None:
        until = time.monotonic() + COMING_UP + 2 * len(self.nodes)
        while (online := self._online()) < len(self.nodes):
            for process in (self.superlink, self.executor, *self.nodes):
                process.check()
            if time.monotonic() > until:
                raise FedhmError(
                    f"only {online} of {len(self.nodes)} SuperNodes are online; see {self.folder.path}/logs"
                )
            report(f"{online} of {len(self.nodes)} SuperNodes are online")
            time.sleep(PAUSE)

    def _online(self) -> int:
        return sum(node["status"] == "online" for node in ask(self.folder.connection, "supernode", "list")["nodes"])

    def newly_dead(self) -> list[Process]:
        """Return the SuperNodes that ended since the last call; raise if the SuperLink or its executor ended."""
        self.superlink.check()
        self.executor.check()
        dead = [node for node in self.nodes if not node.alive and node.name not in self._buried]
        self._buried |= {node.name for node in dead}
        return dead

    def end_nodes(self) -> None:
        for each in (Process.tell_to_end, Process.end):
            for node in self.nodes:
                each(node)


@contextmanager
def started_fleet(
    folder: FleetFolder, node_configs: Sequence[str], port: int | None, secure: bool, report: Report
) -> Iterator[Fleet]:
    """Run a federation with one SuperNode for each node config: up inside the context, and gone after it."""
    with private_files(), folder.locked() as lock, ExitStack() as stack:
        if port is not None:
            check_port(port)
        own_port, *node_ports = free_ports(1 + len(node_configs))
        own_port = port or own_port
        report("starting the SuperLink")
        fleet = Fleet(folder, own_port, secure, lock)
        stack.enter_context(ended_afterwards(fleet.superlink))
        stack.enter_context(ended_afterwards(fleet.executor))
        stack.callback(fleet.end_nodes)  # first, so that they can still disconnect from the SuperLink
        fleet.wait_for_superlink(own_port, report)
        for client, (node_port, node_config) in enumerate(zip(node_ports, node_configs, strict=True)):
            report(f"starting SuperNode {client + 1} of {len(node_configs)}")
            fleet.add(client, node_port, node_config)
        fleet.wait_for_nodes(report)
        folder.announce(fleet.address, len(node_configs))
        yield fleet
