"""Flower's processes as this library starts them: a SuperLink for simulations, or one with SuperNodes of its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedhm.flower.processes.connection import Connection, write_connection
from fedhm.flower.processes.process import HOST, Process, check_installed, ended_afterwards, free_ports

GOODBYES = 3.0  # seconds that SuperNodes have to disconnect from a SuperLink whose parent has vanished


@contextmanager
def simulation_superlink(folder: Path) -> Iterator[Connection]:
    """Run a SuperLink that simulates its clients on Ray, while the context lasts; its files are in `folder`."""
    check_installed()
    connection = Connection((folder / "flower").absolute(), "simulation")
    (port,) = free_ports(1)
    write_connection(connection, port, None)
    command = superlink_command(port, None, ["--simulation"])
    with ended_afterwards(Process("the SuperLink", command, connection.home, folder / "superlink.log")) as process:
        process.wait_for_port(port)
        yield connection


def superlink_command(port: int, certificates: Path | None, more: Sequence[str]) -> list[str]:
    """Return the command of a SuperLink; with certificates, only SuperNodes whose keys are registered get in."""
    return [
        "flower-superlink",
        *(_encrypted(certificates) if certificates else ["--insecure"]),
        "--disable-runtime-dependency-installation",  # apps run with what is installed here
        *("--host", HOST, "--port", str(port)),
        *more,
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
