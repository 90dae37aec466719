"""A SuperLink: the connection to it, Flower's own command `flwr`, and the commands that start it and its nodes."""

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
from fedhm.flower.processes.process import HOST, Process, environment, executable, free_ports, replaced_commands
from fedhm.flower.processes.resident_flwr import can_run, run_resident
from fedhm.flower.processes.secrets import Secrets, ensure_certificates, owner_only_files
from fedhm.machine.files import write_atomically
from fedhm.machine.printable import printable, quoted_command

# ---- connections ----


@dataclass(frozen=True)
class Connection:
    """A connection to a SuperLink: the table `[superlink.NAME]` in the `config.toml` of `home`, which is FLWR_HOME."""

    home: Path
    name: str
    processes: tuple[Process, ...] = field(default=(), compare=False)  # of the SuperLink, if this process started it

    @property
    def encrypted(self) -> bool:
        """Tell whether the connection uses TLS. Without it, SuperNodes have random keys, new at each start."""
        try:
            table = tomllib.loads((self.home / "config.toml").read_text(encoding="utf-8"))
            return not table["superlink"][self.name].get("insecure")
        except (OSError, ValueError, KeyError, AttributeError):
            return True  # Flower's own command will say what is wrong

    def check(self) -> None:
        """Raise if one of the SuperLink's processes has ended: no run would start any more."""
        for process in self.processes:
            process.check()


def write_connection(connection: Connection, port: int, authority: Path | None) -> None:
    """Write a connection to a SuperLink on this machine; without the authority of its certificate, in plain text."""
    trust = {"insecure": True} if authority is None else {"root-certificates": str(authority.absolute())}
    table = {"default": connection.name, connection.name: {"address": f"{HOST}:{port}", **trust}}
    write_atomically(connection.home / "config.toml", tomli_w.dumps({"superlink": table}))


def named_connection(name: str) -> Connection:
    """Return a connection from the user's own Flower configuration."""
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    try:
        table = tomllib.loads((home / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        table = {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedhmError(f"Flower's configuration {home / 'config.toml'} is damaged: {error}") from None
    known = [key for key, value in table.get("superlink", {}).items() if isinstance(value, dict)]
    if name not in known:
        others = f", which has {', '.join(known)}" if known else ""
        raise FedhmError(
            f"'{name}' is neither the folder of a 'fedhm flower up' nor a SuperLink in {home / 'config.toml'}{others}: "
            f"start one with {quoted_command('fedhm', 'flower', 'up', '--folder', name)} in another terminal"
        )
    return Connection(home, name)


# ---- Flower's own command ----

COMMAND_TIMEOUT = 300.0  # seconds; a command that ships an app to a busy machine can be slow


def flwr(connection: Connection, *arguments: str) -> str:
    """Return the output of `flwr ARGUMENTS NAME`; the connection's name comes last in all of Flower's subcommands."""
    command = executable("flwr", connection.home)
    variables = environment(connection.home) | {"COLUMNS": "1000", "NO_COLOR": "1"}
    try:
        if can_run(command):
            done = run_resident([*arguments, connection.name], variables, COMMAND_TIMEOUT)
        else:
            done = subprocess.run(
                [command, *arguments, connection.name],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                env=variables,
                timeout=COMMAND_TIMEOUT,
                check=False,
            )
    except (subprocess.TimeoutExpired, TimeoutError):
        raise FedhmError(f"'flwr {arguments[0]}' did not answer within {COMMAND_TIMEOUT:.0f} seconds") from None
    if done.returncode != 0:
        raise FedhmError(f"'flwr {arguments[0]}' failed: {_error_sentence(done.stderr or done.stdout)}")
    return done.stdout


def flwr_json(connection: Connection, *arguments: str) -> dict[str, Any]:
    """Return the answer of `flwr` in JSON, which also tells of failures that the exit code hides."""
    output = flwr(connection, *arguments, "--format", "json")
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError:
        raise FedhmError(f"'flwr {arguments[0]}' failed: {_error_sentence(output)}") from None
    if not answer.get("success"):
        raise FedhmError(f"'flwr {arguments[0]}' failed: {_error_sentence(str(answer.get('error-message', '')))}")
    return answer


def start_run(
    connection: Connection,
    app: Path,
    run_config: Mapping[str, str | int | float | bool],
    federation_config: str = "",
) -> int:
    """Start a run of the app and return its id. The app's own run config must have the keys of `run_config`."""
    with TemporaryDirectory() as folder:
        changes = Path(folder) / "run.toml"  # Flower misreads quotes in values on its command line
        changes.write_text(tomli_w.dumps(dict(run_config)), encoding="utf-8")
        arguments = ["run", str(app), "--run-config", str(changes)]
        if federation_config:
            arguments += ["--federation-config", federation_config]
        return int(flwr_json(connection, *arguments)["run-id"])


def stop_run(connection: Connection, run_id: int) -> None:
    """Stop a run, unless it has ended by itself."""
    try:
        flwr_json(connection, "stop", str(run_id))
    except FedhmError:
        if not run_status(connection, run_id).startswith("finished"):
            raise


def run_status(connection: Connection, run_id: int) -> str:
    """Return pending, starting, running, finished:completed, finished:failed or finished:stopped."""
    (run,) = flwr_json(connection, "list", "--run-id", str(run_id))["runs"]
    return str(run["status"])


def _error_sentence(text: str) -> str:
    """Return Flower's error message without its box. Flower prints it last, after an empty line."""
    last = text.strip().split("\n\n")[-1]
    words = (line.strip("│╭╮╰╯─ ") for line in last.splitlines())
    return printable(" ".join(word for word in words if word and word != "Error"), 1000) or "it does not say why"


# ---- starting a SuperLink and its nodes ----

TOKEN_SUPERLINK = Path(__file__).with_name("guarded_superlink.py")
FORKING_EXECUTOR = Path(__file__).with_name("forking_executor.py")
EXECUTOR_NAME = "the SuperLink's executor"


@contextmanager
def simulation_superlink(folder: Path) -> Iterator[Connection]:
    """Run a SuperLink that simulates its clients on Ray, while the context lasts; its files are in `folder`.

    Other users of this machine can reach its ports, but none of them lets a stranger in.
    """
    folder = folder.absolute()
    connection, certificates = Connection(folder / "flower", "simulation"), folder / "certificates"
    (port,) = free_ports(1)
    with owner_only_files():
        ensure_certificates(certificates)
        write_connection(connection, port, certificates / "ca.crt")
    home, secrets = connection.home, Secrets(connection.home)
    secrets.write(f"{HOST}:{port}")
    install_forking_executor(home)
    command = guarded(superlink_command(port, certificates, ["--simulation"]), secrets)
    executor_command = superexec_command(port, certificates, secrets)
    with (
        _private_ray(secrets) as ray_settings,
        Process("the SuperLink", command, home, folder / "superlink.log") as superlink,
    ):
        superlink.wait_for_port(port)
        log = folder / "executor.log"
        with Process(EXECUTOR_NAME, executor_command, home, log, extra_environment=ray_settings) as executor:
            yield replace(connection, processes=(superlink, executor))


def install_forking_executor(home: Path) -> None:
    """Replace `flower-superexec` for the processes of this home, SuperNodes included, by `forking_executor.py`."""
    command = replaced_commands(home) / "flower-superexec"
    words = shlex.join([sys.executable, "-P", str(FORKING_EXECUTOR), command.name])
    with owner_only_files():
        command.parent.mkdir(parents=True, exist_ok=True)
        command.write_bytes(os.fsencode(f'#!/bin/sh\nexec {words} "$@"\n'))
    command.chmod(0o700)


@contextmanager
def _private_ray(secrets: Secrets) -> Iterator[dict[str, str]]:
    """Yield an environment in which Ray listens on the loopback only, and admits only processes with its token.

    By default Ray admits everybody from everywhere. It opens its own folder to all users, so that folder lies in one
    that is closed. It cannot lie in the run's folder, because the names of sockets must be short.
    """
    short = "/tmp" if sys.platform == "darwin" else None
    with TemporaryDirectory(prefix="fedhm-", dir=short, ignore_cleanup_errors=True) as folder:
        yield {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(secrets.ray),
            "RAY_TMPDIR": folder,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux, too, this says that there is only this machine
        }


def superlink_command(port: int, certificates: Path | None, options: Sequence[str]) -> list[str]:
    """Return the command of a SuperLink; with certificates, it admits only SuperNodes with registered keys."""
    return [
        "flower-superlink",
        *(_tls_options(certificates) if certificates else ["--insecure"]),
        "--disable-runtime-dependency-installation",  # apps run with the installed packages
        *("--host", HOST, "--port", str(port)),
        *options,
    ]


def guarded(command: Sequence[str], secrets: Secrets) -> list[str]:
    """Return the command of a SuperLink that admits only holders of its secrets, and starts no executor of its own."""
    apart = ["--isolation", "process", "--superexec-auth-secret-file", str(secrets.executor)]
    return [sys.executable, "-P", str(TOKEN_SUPERLINK), str(secrets.token), *command, *apart]


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


def _tls_options(certificates: Path) -> list[str]:
    files = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}
    options = [text for option, name in files.items() for text in (f"--ssl-{option}", str(certificates / name))]
    return [*options, "--enable-supernode-auth"]
