"""`fedhm watch`: the page of runs that are going on, for browsers of this machine.

The page asks for its changing part every two seconds, and gets it only if a record has come: that is all there is to
ask for. Nothing is read by a name that a browser gives, so no file of the run can be asked for.
"""

import sys
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from fedhm.errors import FedhmError
from fedhm.report.page.write import live_body, live_page
from fedhm.runs.history import read_runs

LOOPBACK = "127.0.0.1"
FILES = ("records.jsonl", "tiers.json", "config.toml", "models")  # which change when there is something new


class Watched:
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

    def __init__(self, watched: Watched, port: int = 0) -> None:
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
