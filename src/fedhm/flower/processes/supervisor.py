"""The supervisor of a command: ends it and everything that it started, on SIGTERM or when its parent is gone.

Flower's processes start others, some in sessions of their own. Ending a process or its group would leave some behind.

This file is run by its path, `python supervisor.py PARENT_PID LINGER -- COMMAND …`: importing the package would cost
each of Flower's processes seconds. LINGER is how many seconds a command outlives a parent that vanished. A SuperLink
has to hear its SuperNodes disconnect: otherwise it refuses them for a minute when they connect again.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LINUX = sys.platform == "linux"
SET_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL


class Supervisor:
    def __init__(self, parent: int, linger: float, command: list[str]) -> None:
        self.parent, self.linger, self.command = parent, linger, command
        self.stopping = False
        self.status: int | None = None  # of the command, once it has ended

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._request_stop)
        if LINUX:
            _prctl(SET_CHILD_SUBREAPER, 1)  # orphans become children of this process, so that none is lost
        self.child = subprocess.Popen(self.command, start_new_session=True, preexec_fn=_die_with_supervisor)  # noqa: PLW1509
        while not self.stopping and os.getppid() == self.parent and self._alive():
            time.sleep(POLL_SECONDS)
        if not self.stopping:
            self._wait_lingering()
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal_all(number)
            if self._wait_for_end(number):
                break
        return 0 if self.stopping or self.status is None else self.status

    def _request_stop(self, *_: object) -> None:
        self.stopping = True

    def _alive(self) -> bool:
        """Tell whether the command is alive."""
        self._reap()
        return self.status is None

    def _reap(self) -> bool:
        """Reap processes that have ended; tell whether any are left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.child.pid:
                self.status = self.child.returncode = os.waitstatus_to_exitcode(status)

    def _wait_lingering(self) -> None:
        until = time.monotonic() + self.linger
        while not self.stopping and self._alive() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def _wait_for_end(self, number: int) -> bool:
        until = time.monotonic() + GRACE_SECONDS
        while self._reap():
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
            if number == signal.SIGKILL:
                self._signal_all(number)  # again, for processes that were started meanwhile
        return True

    def _signal_all(self, number: int) -> None:
        pids = list(descendants(os.getpid()))
        if self.status is None:
            pids.append(self.child.pid)
        for pid in dict.fromkeys(pids):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def descendants(pid: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for own, parent in _processes():
        children.setdefault(parent, []).append(own)
    known = children.get(pid, [])
    for found in known:
        yield found
        known.extend(children.get(found, []))


def _processes() -> Iterator[tuple[int, int]]:
    """Yield the ids of all processes that have not ended, each with that of its parent."""
    if not LINUX:
        shown = subprocess.Popen(
            ["ps", "-A", "-o", "pid=,ppid=,comm="], stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
        )
        for line in shown.communicate()[0].splitlines():
            pid, parent = line.split()[:2]
            if int(pid) != shown.pid:
                yield int(pid), int(parent)
        return
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if after_name[0] != "Z":
            yield int(path.parent.name), int(after_name[1])


def _die_with_supervisor() -> None:
    if LINUX:
        _prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    parent, linger, separator, *command = sys.argv[1:]
    sys.exit(Supervisor(int(parent), float(linger), command).run())
