"""The page as one file: everything it shows is in it, and its own rules let it fetch nothing."""

import hashlib
import re
import sys
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from threading import Lock
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup, escape

from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.report.interactive import figure
from fedhm.report.plot import Plot
from fedhm.report.sections import Section, Switch, run_sections
from fedhm.report.sheets import BOLD, Sheet
from fedhm.report.still import picture
from fedhm.runs.history import Run, read_runs

LIBRARY = "plotly-basic.min.js"


def page(title: str, sections: Sequence[Section], switches: Sequence[Switch], *, live: bool = False) -> str:
    """Return the whole page; `switches` are what can be turned off on it."""
    scripts = [_asset(LIBRARY), _asset("page.js")]
    return _template("page.html.jinja").render(
        title=title,
        body=body(title, sections, switches),
        css=Markup(_asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        rules=_rules(scripts, live),
        live=live,
    )


def body(title: str, sections: Sequence[Section], switches: Sequence[Switch]) -> Markup:
    """Return what changes while a run goes on: all but styles and scripts."""
    plots = [part for section in sections for part in section.parts if isinstance(part, Plot)]
    rendered = _template("body.html.jinja").render(
        title=title,
        sections=sections,
        switches=[switch for switch in switches if len(switch.names) > 1],
        figures={plot.key: figure(plot) for plot in plots},
        is_plot=lambda part: isinstance(part, Plot),
        is_sheet=lambda part: isinstance(part, Sheet),
        picture=lambda plot: Markup(picture(plot)),
        cell=_cell,
    )
    return Markup(rendered)


def _cell(text: str) -> Markup:
    """Return a table's cell, its **bold** parts as such: only after everything in it is escaped."""
    return Markup(BOLD.sub(r"<strong>\1</strong>", str(escape(text))))


def _rules(scripts: Sequence[str], live: bool) -> str:
    """Return which scripts may run, by their digests, so that nothing that slipped in does; and what may be fetched."""
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


# Writing `report.html`.

FILE = "report.html"


def save_page(runs: Sequence[Run], folder: Path) -> Path:
    """Write the page of runs, and return its path."""
    write_atomically(folder / FILE, page(title_of(runs), run_sections(runs), switches(runs)))
    return folder / FILE


def save_sections(title: str, sections: Sequence[Section], names: Sequence[Switch], folder: Path) -> Path:
    """Write a page of other sections, and return its path."""
    write_atomically(folder / FILE, page(title, sections, names))
    return folder / FILE


def live_page(runs: Sequence[Run]) -> str:
    """Return the page of runs that go on, which asks for news by itself."""
    return page(title_of(runs), run_sections(runs), switches(runs), live=True)


def live_body(runs: Sequence[Run]) -> str:
    """Return the part of that page that changes."""
    return body(title_of(runs), run_sections(runs), switches(runs))


def title_of(runs: Sequence[Run]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def switches(runs: Sequence[Run]) -> list[Switch]:
    """Return what can be turned off on the page."""
    tiers = dict.fromkeys(tier for run in runs for tier in run.tiers)
    return [Switch("tier", "Tiers", list(tiers)), Switch("run", "Runs", [run.name for run in runs])]


# `fedhm watch`: the page of runs that are going on, for browsers of this machine.
#
# The page asks for its changing part every two seconds, and gets it only if a record has come: that is all there is to
# ask for. Nothing is read by a name that a browser gives, so no file of the run can be asked for.

LOOPBACK = "127.0.0.1"
FILES = ("records.jsonl", "tiers.json", "config.toml", "models")  # which change when there is something new


class LivePages:
    """Runs as pages, made again when their folders have something new."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._pages: dict[bool, tuple[str, str]] = {}  # whole or not → its version, and the page
        self._lock = Lock()  # matplotlib draws the pictures, and is no friend of threads

    def page(self, *, whole: bool) -> tuple[str, str]:
        """Return the version of the runs, and the page or its changing part."""
        with self._lock:
            version = self._version()
            if self._pages.get(whole, ("", ""))[0] != version:
                runs = read_runs(self._folders)
                self._pages[whole] = version, live_page(runs) if whole else live_body(runs)
            return self._pages[whole]

    def _version(self) -> str:
        files = [folder / name for folder in self._folders for name in FILES]
        known = [file.stat() for file in files if file.exists()]
        return '"' + "-".join(f"{stat.st_mtime_ns:x}.{stat.st_size:x}" for stat in known) + '"'


class PageServer(ThreadingHTTPServer):
    """Answers on this machine alone."""

    daemon_threads = True

    def __init__(self, watched: LivePages, port: int = 0) -> None:
        self.watched = watched
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise FedhmError(f"cannot listen on port {port}: {error.strerror}; choose another with --port") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away before it had its answer; all else is an error of ours."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30.0  # of a browser that says nothing

    def do_GET(self) -> None:
        wanted = {"/": True, "/main": False}.get(self.path)
        if self.headers.get("Host") not in (
            f"{LOOPBACK}:{self.server.server_port}",
            f"localhost:{self.server.server_port}",
        ):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "another name than that of this machine")  # DNS rebinding
        elif wanted is None:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is only one page: /")
        else:
            self._show(wanted)

    def _show(self, whole: bool) -> None:
        try:
            version, content = self.server.watched.page(whole=whole)
        except FedhmError as error:  # the run is about to begin, or its folder went away
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))
            return
        if self.headers.get("If-None-Match") == version:
            self._answer(HTTPStatus.NOT_MODIFIED, "text/html", "", version)
        else:
            self._answer(HTTPStatus.OK, "text/html", content, version)

    def _answer(self, status: HTTPStatus, kind: str, content: str, version: str = "") -> None:
        sent = content.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(sent)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if version:
            self.send_header("ETag", version)
        if status is HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Refresh", "2")
        self.end_headers()
        if status is not HTTPStatus.NOT_MODIFIED:
            self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        """Say nothing: what was asked for is no news."""
