"""`report.html`: a page of sections in one file, and `fedhm watch`, which serves the page of a run that goes on.

Everything that the page shows is in the file. Its Content-Security-Policy lets it fetch nothing, and it can be read
without scripts.
"""

import hashlib
import re
import sys
import time
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

from jinja2 import Environment, Template
from markupsafe import Markup, escape

from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.machine.printable import printable
from fedhm.report.palette import dark_twins_css
from fedhm.report.plot import Plot, render_plotly, render_svg, render_table
from fedhm.report.sections import Section, Switch, run_sections
from fedhm.report.sheets import BOLD, Sheet
from fedhm.runs.history import Run, read_runs

PAGE_FILE = "report.html"
PLOTLY = "plotly-basic.min.js"


def save_page(runs: Sequence[Run], folder: Path) -> Path:
    """Write the page of runs and return its path."""
    return save_sections(_title(runs), run_sections(runs), run_switches(runs), folder)


def save_sections(title: str, sections: Sequence[Section], switches: Sequence[Switch], folder: Path) -> Path:
    """Write a page of any sections and return its path."""
    write_atomically(folder / PAGE_FILE, render_page(title, sections, switches))
    return folder / PAGE_FILE


def render_page(title: str, sections: Sequence[Section], switches: Sequence[Switch]) -> str:
    """Return the whole page."""
    return _render_frame(title, _render_body(title, sections, switches), live=False)


def _render_frame(title: str, body: Markup, *, live: bool) -> str:
    """Return a page around its body, with styles and scripts. A live page asks its server for news."""
    scripts = [_asset(PLOTLY), _asset("page.js")]
    return _template("page.html.jinja").render(
        title=title,
        body=body,
        css=Markup(dark_twins_css() + _asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        rules=_content_security_policy(scripts, live),
        live=live,
    )


def run_switches(runs: Sequence[Run]) -> list[Switch]:
    """Return the boxes that hide tiers and runs."""
    tiers = dict.fromkeys(tier for run in runs for tier in run.tiers)
    return [Switch("tier", "Tiers", list(tiers)), Switch("run", "Runs", [run.name for run in runs])]


def _title(runs: Sequence[Run]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def _render_body(title: str, sections: Sequence[Section], switches: Sequence[Switch]) -> Markup:
    """Return the part that changes while a run goes on: all but styles and scripts."""
    plots = [part for section in sections for part in section.parts if isinstance(part, Plot)]
    rendered = _template("body.html.jinja").render(
        title=title,
        sections=sections,
        switches=[switch for switch in switches if len(switch.names) > 1],
        figures={plot.key: render_plotly(plot) for plot in plots},
        is_plot=lambda part: isinstance(part, Plot),
        is_sheet=lambda part: isinstance(part, Sheet),
        picture=lambda plot: Markup(render_svg(plot)),
        plot_table=render_table,
        cell=_cell,
    )
    return Markup(rendered)


def _cell(text: str) -> Markup:
    """Return a table's cell with its **bold** parts. Everything in it is escaped before.

    A narrow screen may put a remark at the end, such as `(best 93.4)`, below the number.
    """
    bold = BOLD.sub(r"<strong>\1</strong>", str(escape(text)))
    return Markup(_REMARK.sub(r'<span class="value">\1</span> <span class="remark">\2</span>', bold))


_REMARK = re.compile(r"^(.*) (\(best [^()<>]*\))$")


def _content_security_policy(scripts: Sequence[str], live: bool) -> str:
    """Allow our own scripts, by their digests, so that no other can run. Only a live page may fetch its news."""
    digests = " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    fetched = "connect-src 'self'; " if live else ""
    return f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; {fetched}img-src data: blob:"


@cache
def _asset(name: str) -> str:
    return (resources.files("fedhm.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["slug"] = lambda text: re.sub(r"\W+", "-", text.lower())
    return environment.from_string(_asset(name))


# `fedhm watch`: the page of runs that go on, for browsers on this machine.
#
# The page asks for its changing part every two seconds, and gets it only if there is a new record. These are the only
# two addresses. No path that a browser sends is looked up in the file system, so no file of the run can be asked for.

LOOPBACK = "127.0.0.1"
WATCHED_FILES = ("records.jsonl", "tiers.json", "config.toml", "models")  # one of them changes with every news


RETRY_SECONDS = 10.0  # after a rendering that failed, until the same state of the runs is tried again


class LivePage(NamedTuple):
    """What is served of one state of the runs."""

    version: str
    whole: str
    part: str  # that changes while a run goes on


class LivePages:
    """The page of runs, rendered once for each change of their folders.

    A reader gets the stored page at once. If the runs have changed, the reader also starts the next rendering, which
    later readers get. Only the first readers wait, since nothing is stored yet. If a rendering fails, the last good
    page stays.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = Lock()  # held for moments, never during a rendering
        self._stored: LivePage | None = None
        # The latest rendering. The next one waits for its end: matplotlib is not safe in several threads.
        self._rendering: Future[LivePage] = Future()
        self._rendering.set_exception(FedhmError("nothing was rendered yet"))
        self._failed: tuple[str, float] = ("", 0.0)  # the version that could not be rendered, and when

    def latest(self) -> LivePage:
        """Return the stored page; the first readers wait for it, and get the error if it cannot be rendered."""
        with self._lock:
            version, stored = self._version(), self._stored
            if self._rendering.done() and self._is_due(version):
                rendering: Future[LivePage] = Future()
                Thread(target=self._render, args=(version, rendering), daemon=True).start()
                self._rendering = rendering
            waited_for = self._rendering
        return stored or waited_for.result()

    def _is_due(self, version: str) -> bool:
        if self._stored is None:
            return True
        failed, when = self._failed
        waits = version == failed and time.monotonic() - when < RETRY_SECONDS
        return version != self._stored.version and not waits

    def _render(self, version: str, rendering: "Future[LivePage]") -> None:
        try:
            runs = read_runs(self._folders)
            title = _title(runs)
            body = _render_body(title, run_sections(runs), run_switches(runs))
            page = LivePage(version, _render_frame(title, body, live=True), body)
        except Exception as error:  # whatever it is, readers get the last good page, or this sentence
            self._failed = version, time.monotonic()
            sentence = str(error) if isinstance(error, FedhmError) else f"{type(error).__name__}: {error}"
            if self._stored:
                print(f"fedhm: the page shows an earlier state: {printable(sentence)}", file=sys.stderr)
            rendering.set_exception(FedhmError(sentence))
        else:
            self._stored = page
            rendering.set_result(page)

    def _version(self) -> str:
        known: list[str] = []
        for file in (folder / name for folder in self._folders for name in WATCHED_FILES):
            with suppress(OSError):  # it is not there yet
                stat = file.stat()
                known.append(f"{stat.st_mtime_ns:x}.{stat.st_size:x}")
        return '"' + "-".join(known) + '"'


class PageServer(ThreadingHTTPServer):
    """An HTTP server that answers on this machine only."""

    daemon_threads = True

    def __init__(self, pages: LivePages, port: int = 0) -> None:
        self.pages = pages
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise FedhmError(f"cannot listen on port {port}: {error.strerror}; choose another with --port") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that went away before they had their answer. Everything else is an error of ours."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30.0  # seconds without a word from the browser

    def do_GET(self) -> None:
        whole = {"/": True, "/main": False}.get(self.path)
        own_names = (f"{LOOPBACK}:{self.server.server_port}", f"localhost:{self.server.server_port}")
        if self.headers.get("Host") not in own_names:  # DNS rebinding
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "another name than that of this machine")
        elif whole is None:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is only one page: /")
        else:
            self._answer_page(whole)

    def _answer_page(self, whole: bool) -> None:
        try:
            page = self.server.pages.latest()
        except FedhmError as error:  # such as for a run that is about to begin
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))
            return
        if self.headers.get("If-None-Match") == page.version:
            self._answer(HTTPStatus.NOT_MODIFIED, "text/html", "", page.version)
        else:
            self._answer(HTTPStatus.OK, "text/html", page.whole if whole else page.part, page.version)

    def _answer(self, status: HTTPStatus, kind: str, content: str, version: str = "") -> None:
        encoded = content.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(encoded)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if version:
            self.send_header("ETag", version)
        if status is HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Refresh", "2")
        self.end_headers()
        if status is not HTTPStatus.NOT_MODIFIED:
            self.wfile.write(encoded)

    def log_message(self, *_: Any) -> None:
        """Log nothing: requests are no news."""
