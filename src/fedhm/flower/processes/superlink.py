"""Flower's processes as this library starts them: a SuperLink for simulations, or one with SuperNodes of its own."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from fedhm.flower.processes.connection import Connection, write_connection
from fedhm.flower.processes.private import Secrets, private_files
from fedhm.flower.processes.process import HOST, Process, check_installed, ended_afterwards, free_ports, own_commands

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
    from fedhm.flower.processes.certificates import ensure_certificates  # needs what comes with Flower

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
