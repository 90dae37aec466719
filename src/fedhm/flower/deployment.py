"""`fedhm flower up`: a SuperLink and its SuperNodes on this machine, up until Ctrl-C, and the folder they live in."""

import argparse
import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import lock_descriptor
from rich.console import Console

from fedhm.errors import FedhmError
from fedhm.flower.processes.process import HOST, Process, check_port, free_ports
from fedhm.flower.processes.secrets import Secrets, ensure_certificates, ensure_client_key, owner_only_files
from fedhm.flower.processes.superlink import (
    EXECUTOR_NAME,
    Connection,
    flwr_json,
    guarded,
    install_forking_executor,
    named_connection,
    superexec_command,
    superlink_command,
    supernode_command,
    write_connection,
)
from fedhm.machine.files import write_atomically
from fedhm.machine.printable import quoted_command

CONNECTION_NAME = "federation"
CLEANUP_TIMEOUT = 30.0  # seconds until the processes of a killed deployment are gone
OFFLINE_TIMEOUT = 90.0  # seconds; a SuperLink takes 60 to notice that a SuperNode ended without disconnecting
START_TIMEOUT = 120.0  # seconds for all SuperNodes, and two more for each
NODE_POLL_SECONDS = 2.0  # each look starts a command that takes over a second of CPU, which the SuperNodes need
# Seconds that a SuperLink outlives a parent that vanished. It has to hear its SuperNodes disconnect: otherwise it
# refuses them for a minute when they connect again.
SUPERLINK_LINGER = 3.0

Say = Callable[[str], None]


# ---- the command ----


def up(options: argparse.Namespace, console: Console) -> None:
    node_configs = _node_configs(options.clients, options.tiers, options.memory)
    folder = DeploymentFolder(options.folder.absolute())
    _print_lines(
        console,
        "A federation starts here and needs this terminal until Ctrl-C. When it is up, type in another terminal:",
        *_next_commands(options.folder, options.clients),
    )
    with (
        _sigterm_as_ctrl_c(),
        console.status("") as status,
        start_deployment(folder, node_configs, options.port, not options.insecure, status.update) as deployment,
    ):
        status.stop()
        _print_usage(options.folder, deployment, console)
        _watch_until_ctrl_c(deployment, console)
        console.print("ending the federation …")


def _watch_until_ctrl_c(deployment: "Deployment", console: Console) -> None:
    try:
        while True:
            for node in deployment.newly_dead():
                sentence = f"{node.name} ended, the others go on: {node.last_log_line} ({node.log})"
                console.print(sentence, highlight=False, markup=False, soft_wrap=True)
            time.sleep(0.3)
    except KeyboardInterrupt:
        return


def _print_usage(folder: Path, deployment: "Deployment", console: Console) -> None:
    clients = len(deployment.nodes)
    superlink, *for_clients = deployment.commands
    for_one = for_clients[: len(for_clients) // clients]
    _print_lines(
        console,
        f"A SuperLink at {deployment.address} and {clients} SuperNode{'s' * (clients > 1)} are up. "
        "Leave this terminal as it is, and type in another one:",
        *_next_commands(folder, clients),
        "They were started by these commands of Flower; docs/flower.md has them for several hosts:",
        f"  export FLWR_HOME={shlex.quote(str(deployment.folder.connection.home))}",
        *(f"  {shlex.join(command)}" for command in [superlink, *for_one]),
        *(["  … and likewise for the other clients"] if clients > 1 else []),
        f"Unlike these commands, this SuperLink takes runs only from users who can read "
        f"{shlex.quote(str(folder / 'flower'))}.",
        f"Their logs are in {folder / 'logs'}. Ctrl-C ends them all.",
    )


def _next_commands(folder: Path, clients: int) -> list[str]:
    """Return what to type in another terminal, which may be in another folder."""
    run = f"fedhm run digits --set engine.name=flower engine.superlink={shlex.quote(str(folder))}"
    return [f"  cd {shlex.quote(str(Path.cwd()))}", f"  {run} federation.clients={clients}"]


def _print_lines(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _node_configs(clients: int, tiers: Sequence[str] | None, memory: Sequence[int] | None) -> list[str]:
    if tiers and memory:
        raise FedhmError("--tiers and --memory exclude each other: a client's tier is given, or found by its memory")
    for tier in tiers or ():
        if not re.fullmatch(r"[\w./]+", tier):
            raise FedhmError(f"--tiers takes names of tiers such as full or 1/4, not '{tier}'")
    settings = [f' tier="{tier}"' for tier in tiers or ()]
    settings += [f" memory={megabytes}" for megabytes in memory or ()]
    return [
        f"partition-id={client} num-partitions={clients}{settings[client % len(settings)] if settings else ''}"
        for client in range(clients)
    ]


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, and ignore further ones: these must not leave children behind that are being ended."""
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- the folder ----


@dataclass(frozen=True)
class DeploymentFolder:
    path: Path  # absolute

    @property
    def connection(self) -> Connection:
        return Connection(self.path / "flower", CONNECTION_NAME)

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
        """Return the path of a file that exists while the deployment is up."""
        return self.path / "connection.json"

    @property
    def is_running(self) -> bool:
        try:
            with (self.path / "lock").open(encoding="utf-8") as file:
                return not lock_descriptor(file.fileno(), blocking=False) and _is_alive(file.read())
        except FileNotFoundError:
            return False

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the lock of the one deployment that may run here, and yield its descriptor.

        The deployment's processes inherit the descriptor, so the lock is free once the last of them has ended. A
        FileLock would release it with this process, while a SuperLink may still wait for its SuperNodes.
        """
        with _open_lock(self.path / "lock") as file:
            until = time.monotonic() + CLEANUP_TIMEOUT
            while not lock_descriptor(file.fileno(), blocking=False):
                file.seek(0)
                if _is_alive(file.read()) or time.monotonic() > until:
                    raise FedhmError(f"a federation runs in {self.path} already; end it, or name another --folder")
                time.sleep(0.2)
            file.seek(0)
            file.truncate()
            file.write(json.dumps({"pid": os.getpid()}))
            file.flush()
            self.announcement.unlink(missing_ok=True)  # a killed deployment left it
            (self.path / ".gitignore").write_text("*\n", encoding="utf-8")  # the folder holds private keys
            try:
                yield file.fileno()
            finally:
                self.announcement.unlink(missing_ok=True)

    def announce(self, address: str, clients: int) -> None:
        content = {"address": address, "clients": clients, "home": "flower", "name": CONNECTION_NAME}
        write_atomically(self.announcement, json.dumps(content, indent=2) + "\n")


def connection_of(superlink: str) -> Connection:
    """Return the connection of `superlink`: the folder of a `fedhm flower up`, or the name of a user's connection."""
    folder = DeploymentFolder(Path(superlink).absolute())
    if not (folder.path / "lock").exists():
        return named_connection(superlink)
    if not folder.is_running:
        raise FedhmError(
            f"the federation in {superlink} is not running; start it with "
            f"{quoted_command('fedhm', 'flower', 'up', '--folder', superlink)}"
        )
    if not folder.announcement.exists():
        raise FedhmError(f"the federation in {superlink} is still coming up; try again in some seconds")
    return folder.connection


def _open_lock(path: Path) -> IO[str]:
    try:
        with owner_only_files():
            ours = path.exists() or not path.parent.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            if ours:  # earlier versions made a folder that everybody could read
                path.parent.chmod(0o700)
            return path.open("a+", encoding="utf-8")
    except OSError as error:
        raise FedhmError(f"cannot make the folder {path.parent}: {error.strerror}") from None


def _is_alive(owner: str) -> bool:
    """Tell whether the process that a lock file names is alive."""
    try:
        os.kill(int(json.loads(owner)["pid"]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


# ---- the processes ----


class Deployment:
    """A SuperLink, its executor and its SuperNodes, which come up and end together."""

    def __init__(self, folder: DeploymentFolder, port: int, secure: bool, lock: int) -> None:
        self.folder, self.address = folder, f"{HOST}:{port}"
        self.commands: list[list[str]] = []  # a user could type these to get the same
        self.nodes: list[Process] = []
        self._lock, self._reported_dead = lock, set[str]()
        self._certificates = folder.certificates if secure else None
        self._authority = folder.certificates / "ca.crt" if secure else None
        if secure:
            ensure_certificates(folder.certificates)
        write_connection(folder.connection, port, self._authority)
        self._used_before = folder.database.exists()
        secrets = Secrets(folder.connection.home)
        secrets.write(self.address)
        install_forking_executor(folder.connection.home)
        command = superlink_command(port, self._certificates, ["--database", str(folder.database)])
        self.commands.append(command)  # typed by a user, it starts its own executor and takes runs from everybody
        self.superlink = self._start("the SuperLink", guarded(command, secrets), "superlink", SUPERLINK_LINGER)
        self.executor = self._start(EXECUTOR_NAME, superexec_command(port, self._certificates, secrets), "executor")

    def _start(self, name: str, command: list[str], log: str, linger: float = 0.0) -> Process:
        return Process(name, command, self.folder.connection.home, self.folder.log(log), linger, [self._lock])

    def wait_for_superlink(self, port: int, say: Say) -> None:
        self.superlink.wait_for_port(port)
        until = time.monotonic() + OFFLINE_TIMEOUT
        while self._used_before and self._count_online():
            self.superlink.check()
            if time.monotonic() > until:
                raise FedhmError(f"SuperNodes of an earlier federation are still connected to {self.address}")
            say("waiting until Flower notices that the last federation here was killed (up to a minute)")
            time.sleep(1)

    def add_node(self, client: int, port: int, node_config: str) -> None:
        key = self.folder.key(client)
        if self._authority:
            ensure_client_key(key)
            self._register(f"{key}.pub")
        command = supernode_command(self.address, self._authority, key, port, node_config)
        self.commands.append(command)
        self.nodes.append(self._start(f"SuperNode {client}", command, f"client-{client}"))

    def _register(self, public_key: str) -> None:
        self.commands.append(["flwr", "supernode", "register", public_key, self.folder.connection.name])
        try:
            flwr_json(self.folder.connection, "supernode", "register", public_key)
        except FedhmError as error:
            if "already in use" not in str(error):  # registered by an earlier deployment in this folder
                raise

    def wait_for_nodes(self, say: Say) -> None:
        until = time.monotonic() + START_TIMEOUT + 2 * len(self.nodes)
        while (online := self._count_online()) < len(self.nodes):
            for process in (self.superlink, self.executor, *self.nodes):
                process.check()
            if time.monotonic() > until:
                raise FedhmError(
                    f"only {online} of {len(self.nodes)} SuperNodes are online; see {self.folder.path}/logs"
                )
            say(f"{online} of {len(self.nodes)} SuperNodes are online")
            time.sleep(NODE_POLL_SECONDS)

    def _count_online(self) -> int:
        nodes = flwr_json(self.folder.connection, "supernode", "list")["nodes"]
        return sum(node["status"] == "online" for node in nodes)

    def newly_dead(self) -> list[Process]:
        """Return the SuperNodes that ended since the last call; raise if the SuperLink or its executor ended."""
        self.superlink.check()
        self.executor.check()
        dead = [node for node in self.nodes if not node.alive and node.name not in self._reported_dead]
        self._reported_dead |= {node.name for node in dead}
        return dead

    def stop_nodes(self) -> None:
        for node in self.nodes:
            node.terminate()  # all at once, since each may take seconds to end
        for node in self.nodes:
            node.stop()


@contextmanager
def start_deployment(
    folder: DeploymentFolder, node_configs: Sequence[str], port: int | None, secure: bool, say: Say
) -> Iterator[Deployment]:
    """Run a SuperLink with one SuperNode for each node config: up inside the context, and gone after it."""
    with owner_only_files(), folder.locked() as lock, ExitStack() as stack:
        if port is not None:
            check_port(port)
        free_port, *node_ports = free_ports(1 + len(node_configs))
        superlink_port = port or free_port
        say("starting the SuperLink")
        deployment = Deployment(folder, superlink_port, secure, lock)
        stack.enter_context(deployment.superlink)
        stack.enter_context(deployment.executor)
        stack.callback(deployment.stop_nodes)  # runs first, so that SuperNodes can still disconnect from the SuperLink
        deployment.wait_for_superlink(superlink_port, say)
        for client, (node_port, node_config) in enumerate(zip(node_ports, node_configs, strict=True)):
            say(f"starting SuperNode {client + 1} of {len(node_configs)}")
            deployment.add_node(client, node_port, node_config)
        deployment.wait_for_nodes(say)
        folder.announce(deployment.address, len(node_configs))
        yield deployment
