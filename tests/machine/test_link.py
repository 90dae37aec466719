"""Measuring a link, to a server on this machine."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from fedhm.errors import FedhmError
from fedhm.machine import link


@pytest.fixture
def server() -> Iterator[link.LinkServer]:
    with link.LinkServer("127.0.0.1", 0) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.05,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_both_directions_are_measured(server: link.LinkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LONG_ENOUGH", 0.02)
    up, down = link.measure_link("127.0.0.1", server.port)
    assert min(up, down) > 1e5


def test_other_words_are_not_answered(server: link.LinkServer) -> None:
    for words in (b"sideways 5\n", b"up\n", b"up x\n", b"\n", b"x" * 100):
        with socket.create_connection(("127.0.0.1", server.port), 5) as there:
            there.sendall(words)
            there.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):  # it left words unread
                assert there.recv(1) == b""


def test_nobody_there_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        with pytest.raises(FedhmError, match="is 'fedhm profile --serve' running there"):
            link.measure_link("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("text", ["host", "host:", ":80", "host:0", "host:70000", "host:x"])
def test_what_is_no_address_is_said(text: str) -> None:
    with pytest.raises(FedhmError, match="is no address: write HOST:PORT"):
        link.address(text)
