"""A whole federation on this machine: a SuperLink and its SuperNodes, which come up and end together."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from fedhm.errors import FedhmError
from fedhm.flower.processes.certificates import ensure_certificates, ensure_client_key
from fedhm.flower.processes.connection import ask, write_connection
from fedhm.flower.processes.fleet_folder import FleetFolder
from fedhm.flower.processes.private import Secrets, private_files
from fedhm.flower.processes.process import HOST, Process, check_port, ended_afterwards, free_ports
from fedhm.flower.processes.superlink import (
    EXECUTOR,
    GOODBYES,
    guarded,
    have_ready_executors,
    superexec_command,
    superlink_command,
    supernode_command,
)

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
