"""`fedhm watch` without a browser: who may ask for what."""

import http.client
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, Thread

import pytest

from fedhm.cli import main
from fedhm.report.page import LivePage, LivePages, PageServer
from fedhm.report.sections import Section, run_sections
from fedhm.runs.folder import RunFolder
from fedhm.runs.history import Run
from fedhm.runs.rounds import append_record
from made_runs import eventful_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = eventful_run()
    path = tmp_path_factory.mktemp("runs") / "run"
    with RunFolder.create(path, run.config.resolved()) as begun:
        begun.save_costs(run.costs)
        begun.save_data_facts(run.data)
        append_record(path / "records.jsonl", run.records[0])
    return path


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    monkeypatch.setattr("fedhm.report.page.render_svg", lambda _: "<svg></svg>")
    with PageServer(LivePages([folder])) as serving:
        thread = Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_it_gives_the_page_and_its_changing_part_once(server: PageServer) -> None:
    status, headers, text = ask(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert 'data-live="main"' in text
    status, headers, part = ask(server, "/main")
    assert status == 200
    assert "<main>" in part
    assert "plotly.js" not in part
    status, _, nothing = ask(server, "/main", **{"If-None-Match": headers["ETag"]})
    assert (status, nothing) == (304, "")


@pytest.mark.parametrize(
    "path", ["/config.toml", "/../run/config.toml", "//etc/passwd", "/%2e%2e/config.toml", "/main/x"]
)
def test_nothing_else_can_be_asked_for(server: PageServer, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_it_can_only_be_read(server: PageServer, method: str) -> None:
    assert ask(server, "/", method)[0] == 501


def test_pages_of_others_cannot_read_it_by_a_name_of_theirs(server: PageServer) -> None:
    assert ask(server, "/", Host=f"evil.example:{server.server_port}")[0] == 403
    assert ask(server, "/", Host=f"localhost:{server.server_port}")[0] == 200


def test_it_listens_on_this_machine_alone(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_a_browser_that_goes_away_is_no_news(server: PageServer, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it closes by a reset
            gone.sendall(f"GET / HTTP/1.0\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
    assert ask(server, "/")[0] == 200
    assert capsys.readouterr().err == ""


def test_a_run_that_is_about_to_begin_is_waited_for(folder: Path, server: PageServer) -> None:
    costs = (folder / "tiers.json").read_bytes()
    (folder / "tiers.json").unlink()
    try:
        status, headers, text = ask(server, "/")
    finally:
        (folder / "tiers.json").write_bytes(costs)
    assert (status, headers["Refresh"]) == (503, "2")
    assert "tiers.json" in text


class Renders:
    """Counts renderings, and lets a test hold or break them."""

    def __init__(self) -> None:
        self.count = 0
        self.may_go_on = Event()
        self.may_go_on.set()
        self.error: Exception | None = None

    def __call__(self, runs: Sequence[Run]) -> list[Section]:
        self.count += 1
        assert self.may_go_on.wait(30)
        if self.error:
            raise self.error
        return run_sections(runs)


@pytest.fixture
def renders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Renders]:
    counted = Renders()
    monkeypatch.setattr("fedhm.report.page.run_sections", counted)
    yield counted
    counted.may_go_on.set()


def change(folder: Path) -> None:
    """Make the folder look changed, as a new record does, without changing what it holds."""
    stat = (folder / "records.jsonl").stat()
    os.utime(folder / "records.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))


def read_together(pages: LivePages, readers: int = 8) -> list[LivePage]:
    ready = Barrier(readers)

    def read(_: int) -> LivePage:
        ready.wait(30)
        return pages.latest()

    with ThreadPoolExecutor(readers) as pool:
        return list(pool.map(read, range(readers)))


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_many_readers_cause_one_rendering_and_a_change_one_more(
    folder: Path, server: PageServer, renders: Renders
) -> None:
    pages = server.pages
    first = read_together(pages)
    assert renders.count == 1
    assert len(set(first)) == 1

    change(folder)
    renders.may_go_on.clear()
    assert read_together(pages) == first  # nobody waits for the rendering, which goes on meanwhile
    assert ask(server, "/")[0] == 200
    renders.may_go_on.set()
    wait_until(lambda: pages.latest().version != first[0].version)
    assert len(set(read_together(pages))) == 1
    assert ask(server, "/main", **{"If-None-Match": pages.latest().version})[0] == 304
    assert renders.count == 2


def test_the_last_good_page_stays_if_rendering_fails(
    folder: Path, server: PageServer, renders: Renders, capsys: pytest.CaptureFixture[str]
) -> None:
    good = server.pages.latest()
    renders.error = ValueError("no\x1b[2J axes")
    change(folder)
    wait_until(lambda: server.pages.latest() == good and renders.count == 2)
    said: list[str] = []
    wait_until(lambda: said.append(capsys.readouterr().err) or "".join(said).endswith("\n"))
    assert "".join(said) == "fedhm: the page shows an earlier state: ValueError: no�[2J axes\n"
    for path in ("/", "/main"):
        assert ask(server, path)[0] == 200
    assert renders.count == 2  # the same state is not tried at every question

    renders.error = None
    change(folder)
    wait_until(lambda: server.pages.latest().version != good.version)
    assert renders.count == 3


def test_a_first_rendering_that_fails_is_a_sentence_and_is_tried_again(server: PageServer, renders: Renders) -> None:
    renders.error = ValueError("no axes")
    status, _, text = ask(server, "/")
    assert (status, text) == (503, "ValueError: no axes")
    renders.error = None
    assert ask(server, "/")[0] == 200


def test_a_port_that_is_taken_and_a_folder_that_is_none_are_sentences(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", str(folder), "--port", str(port)]) == 1
    assert f"cannot listen on port {port}" in capsys.readouterr().err
    assert main(["watch", str(tmp_path)]) == 1
    assert "is not the folder of a run" in capsys.readouterr().err
    assert main(["watch", str(folder), "--port", "70000"]) == 1


@pytest.mark.slow
def test_ctrl_c_ends_it_without_a_word(folder: Path) -> None:
    command = [sys.executable, "-m", "fedhm", "watch", str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
