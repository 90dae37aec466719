"""A run as a user has it: `fedhm run` and `fedhm resume` in processes of their own, and a folder."""

import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedhm.flower.processes.supervisor import descendants
from fedhm.runs.folder import rounds_done
from flower_up import not_ignoring_ctrl_c
from run_outcome import outcome
from torture.tally import LostError, TooLateError

PAUSE = 0.005  # seconds between two looks: rounds are short
LONGEST = 300.0  # seconds that anything may take


@dataclass(frozen=True)
class Pace:
    """How long the undisturbed run took, by which moments are drawn."""

    begin: float  # seconds until its folder was there
    round: float  # seconds of a round


UNKNOWN = Pace(1.0, 1.0)


class Victim:
    def __init__(self, folder: Path, settings: Sequence[str], rounds: int, pace: Pace = UNKNOWN) -> None:
        self.folder, self.rounds, self.pace = folder, rounds, pace
        self._settings = [*settings, f"train.rounds={rounds}"]

    @property
    def done(self) -> int:
        return rounds_done(self.folder)

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("*.safetensors"))

    def start(self, file_size: int | None = None) -> "Attempt":
        """Begin the run, or resume it; its files may not grow beyond `file_size`, if that is said."""
        begun = (self.folder / "config.toml").exists()
        arguments = (
            ["resume", str(self.folder)]
            if begun
            else ["run", "digits", "--out", str(self.folder), "--set", *self._settings]
        )
        return Attempt([sys.executable, "-m", "fedhm", *arguments], file_size)

    def finish(self) -> None:
        """Resume the run undisturbed."""
        with self.start() as attempt:
            attempt.must_succeed()

    def moment(self, attempt: "Attempt", rng: random.Random, rounds: int = 0) -> str:
        """Wait for a random moment of what is left of the run, once so many rounds are done; return which it is."""
        first = max(self.done, rounds)
        if first >= self.rounds:
            attempt.must_succeed()
            raise TooLateError
        target = rng.randrange(first - 1 if not rounds else first, self.rounds)  # one less: any time from its start
        attempt.until(lambda: self.done >= target)
        delay = rng.uniform(0, self.pace.round if target >= first else self.pace.begin)
        end = time.monotonic() + delay
        attempt.until(lambda: time.monotonic() >= end)
        return f"after {self.done} of {self.rounds} rounds"

    def difference(self, reference: Path) -> str:
        """Return what is not as in the undisturbed run: a model, the records but for their times, the checkpoint."""
        mine, theirs = outcome(self.folder), outcome(reference)
        if mine == theirs:
            return ""
        return "not the same: " + ", ".join(
            sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        )


class Attempt:
    """One process of a run, with all that it starts."""

    def __init__(self, command: Sequence[str], file_size: int | None) -> None:
        def prepare() -> None:
            not_ignoring_ctrl_c()
            if file_size is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))

        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509
        )
        self.said = ""

    @property
    def children(self) -> list[int]:
        return list(descendants(self.process.pid))

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for something to be so; raise TooLateError if the process ends before."""
        end = time.monotonic() + LONGEST
        while not condition():
            if self.process.poll() is not None:
                self.must_succeed()
                raise TooLateError
            if time.monotonic() > end:
                self.give_up("nothing happened")
            time.sleep(PAUSE)

    def hit(self, number: int, whom: int | None = None) -> None:
        """Send a signal to the process, or to one below it, and see that all of them end, in a sentence if at all."""
        below = self.children
        if whom is None:
            self.process.send_signal(number)
        else:
            with suppress(ProcessLookupError):  # it was done just now
                os.kill(whom, number)
        self.wait()
        end = time.monotonic() + LONGEST / 10
        while left := [pid for pid in below if _lives(pid)]:
            if time.monotonic() > end:
                raise LostError(f"left processes behind: {left}")
            time.sleep(PAUSE)

    def wait(self) -> int:
        """Wait for the end and return the exit code; what was said has to be sentences."""
        try:
            self.said += self.process.communicate(timeout=LONGEST)[1] or ""
        except subprocess.TimeoutExpired:
            self.give_up("does not end")
        except ValueError:  # it was waited for already
            pass
        if "Traceback" in self.said:
            raise LostError(f"ended in a traceback: {self.said.strip().splitlines()[-1]}")
        return self.process.returncode

    def must_succeed(self) -> None:
        if self.wait():
            raise LostError(f"cannot be finished: {self.said.strip()}")

    def give_up(self, why: str) -> None:
        self.process.kill()
        self.process.wait()
        raise LostError(f"{why} within {LONGEST:.0f} s")

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
