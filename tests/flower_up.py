"""`fedhm flower up` as a process, for the tests that need a federation."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import forked
from fedhm.flower.processes.supervisor import descendants


def command(folder: Path, clients: int, *options: str) -> list[str]:
    return ["flower", "up", "--clients", str(clients), "--folder", str(folder), *options]


def not_ignoring_ctrl_c() -> None:
    """Undo SIG_IGN, which background jobs of a shell inherit, and so perhaps the tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Up:
    def __init__(self, folder: Path, clients: int, *options: str) -> None:
        self.folder = folder
        self.output = folder.with_name(folder.name + ".out")
        with self.output.open("w") as file:
            arguments = command(folder, clients, *options)
            self.process = forked.fedhm(arguments, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def said(self) -> str:
        return self.output.read_text()

    def __enter__(self) -> "Up":
        return self

    def __exit__(self, *_: object) -> None:
        """End what a test left running, also after a failure."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)

    def wait(self) -> "Up":
        wait_until(lambda: "Ctrl-C ends them all" in self.said or self.process.poll() is not None, 200)
        assert self.process.poll() is None, self.said
        return self

    def pid_of(self, words: str) -> int:
        (pid,) = self.pids_of(words)
        return pid

    def pids_of(self, words: str) -> list[int]:
        """Return the processes below it that run a script with these arguments."""
        return [pid for pid in descendants(self.process.pid) if is_run_by(pid, words)]

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal, and return the exit code once all processes below it are gone."""
        below = list(descendants(self.process.pid))
        assert len(below) > 1
        self.process.send_signal(number)
        code = self.process.wait(60)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 60)
        return code


def is_run_by(pid: int, command: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return False  # ended meanwhile
    if name in ("fedhm-forks", "flwr-clientapp", "flwr-serverapp"):  # forks, whose command line is not their own
        return name == command
    script, *arguments = command.split()  # behind its interpreter, and perhaps what guards it
    return any(word.endswith(script) for word in words[1:5]) and all(word in words for word in arguments)


def wait_until(condition: Callable[[], object], seconds: float = 200) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)
