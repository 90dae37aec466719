"""How fast a link is: bytes are sent to a host of one's own, and fetched from it, over plain TCP.

A connection begins with one line, `up N` or `down N`. After `up` N bytes come, and one is answered; after `down`, N
bytes are answered. Nothing of what is sent means anything.
"""

import socket
import socketserver
import time
from collections.abc import Callable

from fedhm.errors import FedhmError

MOST = 256_000_000  # bytes of one transfer
FIRST = 100_000
LONG_ENOUGH = 1.0  # second: a shorter transfer is tried again with more
PATIENCE = 30.0  # seconds without a byte, before a link is given up
BLOCK = bytes(65536)


class _Echo(socketserver.StreamRequestHandler):
    timeout = PATIENCE

    def handle(self) -> None:
        words = self.rfile.readline(40).split()
        if len(words) != 2 or words[0] not in (b"up", b"down") or not words[1].isdigit():
            return
        size = min(int(words[1]), MOST)
        try:
            if words[0] == b"down":
                for start in range(0, size, len(BLOCK)):
                    self.wfile.write(BLOCK[: size - start])
                return
            while size and (got := self.rfile.read(min(size, len(BLOCK)))):
                size -= len(got)
            self.wfile.write(b".")
        except OSError:
            return  # it went away


class LinkServer(socketserver.ThreadingTCPServer):
    """Answers whoever measures a link to this host."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        try:
            super().__init__((host, port), _Echo)
        except (OSError, OverflowError) as error:
            raise FedhmError(f"cannot listen at {host}:{port}: {error}") from None

    @property
    def port(self) -> int:
        return int(self.server_address[1])


def address(text: str) -> tuple[str, int]:
    """Read HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise FedhmError(f"'{text}' is no address: write HOST:PORT, as 'fedhm profile --serve' shows it")
    return host.strip("[]"), int(port)


def measure_link(host: str, port: int) -> tuple[float, float]:
    """Return bytes a second up to a host that runs `fedhm profile --serve`, and down from it."""
    try:
        return _rate(lambda size: _up(host, port, size)), _rate(lambda size: _down(host, port, size))
    except (OSError, EOFError) as error:
        raise FedhmError(
            f"cannot measure the link to {host}:{port}: {error}; is 'fedhm profile --serve' running there?"
        ) from None


def _rate(send: Callable[[int], None]) -> float:
    size = FIRST
    while True:
        started = time.perf_counter()
        send(size)
        took = max(time.perf_counter() - started, 1e-9)
        if took >= LONG_ENOUGH or size == MOST:
            return size / took
        size = min(MOST, int(size * min(10.0, 1.5 * LONG_ENOUGH / took)) + 1)


def _up(host: str, port: int, size: int) -> None:
    with socket.create_connection((host, port), PATIENCE) as link:
        link.sendall(f"up {size}\n".encode())
        for start in range(0, size, len(BLOCK)):
            link.sendall(BLOCK[: size - start])
        if not link.recv(1):
            raise EOFError("it closed the connection")


def _down(host: str, port: int, size: int) -> None:
    with socket.create_connection((host, port), PATIENCE) as link:
        link.sendall(f"down {size}\n".encode())
        while size:
            got = len(link.recv(len(BLOCK)))
            if not got:
                raise EOFError("it closed the connection")
            size -= got
