"""How the process that runs the loop, which Flower starts, tells the one that was asked for it how it goes."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedhm.machine.locks import is_locked, take_lock
from fedhm.server.record import Record

Status = dict[str, Any]


class StatusFile:
    """A watcher that keeps a small file up to date. Its lock is held as long as the process lives."""

    def __init__(self, path: Path) -> None:
        self._path, self._status = path, {"state": "waiting"}
        self._lock = take_lock(_lock_of(path), wait=-1)  # whoever asks `is_gone` holds it for a moment
        self._write()

    def started(self, done: int, rounds: int) -> None:
        self._write(state="running", started_at=done, done=done, rounds=rounds)

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None:
        self._write(task=[round_number, what, done, of])

    def round_done(self, record: Record) -> None:
        self._write(done=record.round)

    def said(self, sentence: str) -> None:
        self._write(said=sentence)

    def ended(self, error: str = "", *, unforeseen: bool = False) -> None:
        self._write(state="ended", error=error, unforeseen=unforeseen)

    def _write(self, **news: Any) -> None:
        self._status = {**self._status, **news}
        with suppress(OSError):  # whoever asked may be gone, with the file's folder
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._status))
            new.replace(self._path)


def read_status(path: Path) -> Status | None:
    """Return what the status file says; None until the process has begun."""
    try:
        status: Status = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return status


def is_gone(path: Path) -> bool:
    """Tell whether the process that wrote the status file has ended, in whichever way."""
    return not is_locked(_lock_of(path))


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")
