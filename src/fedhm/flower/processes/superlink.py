"""A connection to a SuperLink, and what is asked of it with Flower's own command."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

from fedhm.errors import FedhmError
from fedhm.flower.processes.process import (
    HOST,
    Process,
    check_installed,
    ended_afterwards,
    executable,
    free_ports,
    own_commands,
)
from fedhm.flower.processes.process import environment as environment_of
from fedhm.flower.processes.ready_commands import answered, is_ready
from fedhm.flower.processes.secrets import Secrets, private_files
from fedhm.machine.files import write_atomically
from fedhm.machine.printable import printable

ANSWER = 300.0  # seconds that a command may take; one that ships an app to a busy machine can be slow


@dataclass(frozen=True)
class Connection:
    """A connection's place: `[superlink.NAME]` in the `config.toml` of `home`, which is FLWR_HOME."""

    home: Path
    name: str
    processes: tuple[Process, ...] = field(default=(), compare=False)  # of the SuperLink, where they are this process's

    @property
    def encrypted(self) -> bool:
        """Tell whether it is by TLS. Without, Flower registers no keys: a SuperNode makes up one at each start."""
        try:
            table = tomllib.loads((self.home / "config.toml").read_text())
            return not table["superlink"][self.name].get("insecure")
        except (OSError, ValueError, KeyError, AttributeError):
            return True  # Flower's own command will say what is wrong

    def check(self) -> None:
        """Raise if one of the SuperLink's processes ended: no run would start any more."""
        for process in self.processes:
            process.check()


def write_connection(connection: Connection, port: int, authority: Path | None) -> None:
    """Write a connection to a SuperLink on this machine; without the authority of its certificate, in plain text."""
    trust = {"insecure": True} if authority is None else {"root-certificates": str(authority.absolute())}
    table = {"default": connection.name, connection.name: {"address": f"127.0.0.1:{port}", **trust}}
    write_atomically(connection.home / "config.toml", tomli_w.dumps({"superlink": table}))


def named_connection(name: str) -> Connection:
    """Return a connection that the user has in a Flower configuration."""
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    try:
        table = tomllib.loads((home / "config.toml").read_text())
    except FileNotFoundError:
        table = {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedhmError(f"Flower's configuration {home / 'config.toml'} is damaged: {error}") from None
    known = [key for key, value in table.get("superlink", {}).items() if isinstance(value, dict)]
    if name not in known:
        others = f"; it has {', '.join(known)}" if known else ""
        raise FedhmError(
            f"'{name}' is neither the folder of a 'fedhm flower up' nor a SuperLink in {home / 'config.toml'}{others}"
        )
    return Connection(home, name)


def flwr(connection: Connection, *arguments: str) -> str:
    """Return what `flwr ARGUMENTS NAME` prints; a connection's name comes last in all of Flower's subcommands."""
    check_installed()
    command, environment = executable("flwr", connection.home), _environment(connection)
    words = [*arguments, connection.name]
    try:
        if is_ready(command):
            done = answered(words, environment, ANSWER)
        else:
            done = subprocess.run(
                [command, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=environment,
                timeout=ANSWER,
                check=False,
            )
    except (subprocess.TimeoutExpired, TimeoutError):
        raise FedhmError(f"'flwr {arguments[0]}' did not answer within {ANSWER:.0f} seconds") from None
    if done.returncode != 0:
        raise FedhmError(f"'flwr {arguments[0]}' failed: {_sentence(done.stderr or done.stdout)}")
    return done.stdout


def _environment(connection: Connection) -> dict[str, str]:
    return environment_of(connection.home) | {"COLUMNS": "1000", "NO_COLOR": "1"}


def ask(connection: Connection, *arguments: str) -> dict[str, Any]:
    """Return what `flwr` answers in JSON, which tells of failures that the exit code does not."""
    shown = flwr(connection, *arguments, "--format", "json")
    try:
        answer: dict[str, Any] = json.loads(shown)
    except ValueError:
        raise FedhmError(f"'flwr {arguments[0]}' failed: {_sentence(shown)}") from None
    if not answer.get("success"):
        raise FedhmError(f"'flwr {arguments[0]}' failed: {_sentence(str(answer.get('error-message', '')))}")
    return answer


def submit(
    connection: Connection,
    app: Path,
    run_config: Mapping[str, str | int | float | bool],
    federation_config: str = "",
) -> int:
    """Start a run of the app and return its id. Keys of the run config must be in the app's own."""
    with TemporaryDirectory() as folder:
        changes = Path(folder) / "run.toml"  # Flower reads the quotes of values on its command line wrongly
        changes.write_text(tomli_w.dumps(dict(run_config)), encoding="utf-8")
        arguments = ["run", str(app), "--run-config", str(changes)]
        if federation_config:
            arguments += ["--federation-config", federation_config]
        return int(ask(connection, *arguments)["run-id"])


def stop(connection: Connection, run_id: int) -> None:
    """Stop a run, unless it has ended by itself."""
    try:
        ask(connection, "stop", str(run_id))
    except FedhmError:
        if not status(connection, run_id).startswith("finished"):
            raise


def status(connection: Connection, run_id: int) -> str:
    """Return pending, starting, running, finished:completed, finished:failed or finished:stopped."""
    (run,) = ask(connection, "list", "--run-id", str(run_id))["runs"]
    return str(run["status"])


def _sentence(text: str) -> str:
    """Return what Flower says is wrong, which it prints after what it does and an empty line, without its boxes."""
    last = text.strip().split("\n\n")[-1]
    words = (line.strip("│╭╮╰╯─ ") for line in last.splitlines())
    return printable(" ".join(word for word in words if word and word != "Error"), 1000) or "it does not say why"


# Flower's processes as this library starts them: a SuperLink for simulations, or one with SuperNodes of its own.

GUARD = Path(__file__).with_name("guarded_superlink.py")
READY = Path(__file__).with_name("ready_executor.py")
EXECUTOR = "the SuperLink's executor"
GOODBYES = 3.0  # seconds that SuperNodes have to disconnect from a SuperLink whose parent has vanished


@contextmanager
def simulation_superlink(folder: Path) -> Iterator[Connection]:
    """Run a SuperLink that simulates its clients on Ray, while the context lasts; its files are in `folder`.

    Other users of this machine reach its ports, but are let in by none of them.
    """
    check_installed()
    from fedhm.flower.processes.secrets import ensure_certificates

    folder = folder.absolute()
    connection, certificates = Connection(folder / "flower", "simulation"), folder / "certificates"
    (port,) = free_ports(1)
    with private_files():
        ensure_certificates(certificates)
        write_connection(connection, port, certificates / "ca.crt")
    home, secrets = connection.home, Secrets(connection.home)
    secrets.make(f"{HOST}:{port}")
    have_ready_executors(home)
    command = guarded(superlink_command(port, certificates, ["--simulation"]), secrets)
    executor = superexec_command(port, certificates, secrets)
    with (
        _private_ray(secrets) as settings,
        ended_afterwards(Process("the SuperLink", command, home, folder / "superlink.log")) as superlink,
    ):
        superlink.wait_for_port(port)
        started = Process(EXECUTOR, executor, home, folder / "executor.log", settings=settings)
        with ended_afterwards(started):
            yield replace(connection, processes=(superlink, started))


def have_ready_executors(home: Path) -> None:
    """Have the processes of this home, SuperNodes among them, find an executor whose processes begin at once."""
    command = own_commands(home) / "flower-superexec"
    words = shlex.join([sys.executable, "-P", str(READY), command.name])
    with private_files():
        command.parent.mkdir(parents=True, exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    command.chmod(0o700)


@contextmanager
def _private_ray(secrets: Secrets) -> Iterator[dict[str, str]]:
    """Yield an environment in which Ray listens on the loopback only, and lets in only whoever has its token.

    By itself it lets everybody in, from everywhere. It opens its own folder to all users, so that lies in one that is
    not open; not in the run's, since names of sockets must not be long.
    """
    short = "/tmp" if sys.platform == "darwin" else None
    with TemporaryDirectory(prefix="fedhm-", dir=short, ignore_cleanup_errors=True) as folder:
        yield {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(secrets.ray),
            "RAY_TMPDIR": folder,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # elsewhere too this says that there is but this machine
        }


def superlink_command(port: int, certificates: Path | None, more: Sequence[str]) -> list[str]:
    """Return the command of a SuperLink; with certificates, only SuperNodes whose keys are registered get in."""
    return [
        "flower-superlink",
        *(_encrypted(certificates) if certificates else ["--insecure"]),
        "--disable-runtime-dependency-installation",  # apps run with what is installed here
        *("--host", HOST, "--port", str(port)),
        *more,
    ]


def guarded(command: Sequence[str], secrets: Secrets) -> list[str]:
    """Return the command of a SuperLink that lets in only whoever has its secrets, and has its executor beside it."""
    apart = ["--isolation", "process", "--superexec-auth-secret-file", str(secrets.executor)]
    return [sys.executable, "-P", str(GUARD), str(secrets.token), *command, *apart]


def superexec_command(port: int, certificates: Path | None, secrets: Secrets) -> list[str]:
    """Return the command of the executor, which starts the processes of runs."""
    return [
        "flower-superexec",
        *(["--root-certificates", str(certificates / "ca.crt")] if certificates else ["--insecure"]),
        *("--runtime-api-address", f"{HOST}:{port}"),
        *("--superexec-auth-secret-file", str(secrets.executor)),
    ]


def supernode_command(superlink: str, authority: Path | None, key: Path, port: int, node_config: str) -> list[str]:
    trusted = ["--root-certificates", str(authority), "--auth-supernode-private-key", str(key)]
    return [
        "flower-supernode",
        *("--superlink", superlink),
        *(trusted if authority else ["--insecure"]),
        *("--host", HOST, "--port", str(port)),
        *("--node-config", node_config),
    ]


def _encrypted(certificates: Path) -> list[str]:
    files = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}
    options = [text for option, name in files.items() for text in (f"--ssl-{option}", str(certificates / name))]
    return [*options, "--enable-supernode-auth"]
