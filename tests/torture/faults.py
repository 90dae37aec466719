"""What is done to local runs. Each fault starts what is left of a run, hits it, and says when that was."""

import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torture.tally import LostError, TooLateError
from torture.victim import Victim

Fault = Callable[[Victim, random.Random], str]
DISK = 64 << 20  # bytes of the small disk


def server_ends_by(number: signal.Signals) -> Fault:
    def strike(run: Victim, rng: random.Random) -> str:
        with run.start() as attempt:
            when = run.moment(attempt, rng)
            attempt.hit(number)
            if attempt.process.returncode == 0:
                raise TooLateError
        return when

    return strike


def worker_dies(run: Victim, rng: random.Random) -> str:
    with run.start() as attempt:
        when = run.moment(attempt, rng)
        found: list[int] = []
        attempt.until(lambda: found.extend(attempt.children) or found)
        attempt.hit(signal.SIGKILL, rng.choice(found))
        if attempt.process.returncode == 0:
            raise TooLateError  # it had nothing to do any more
        _sentence(attempt.said, "worker")
    return when


def disk_is_full(run: Victim, rng: random.Random) -> str:
    """Leave less than two checkpoints of room on the disk, while the run goes on."""
    filler = run.folder.parent / "filler"
    room = rng.randrange(2 * _checkpoint_size(run))
    with run.start() as attempt:
        try:
            when = run.moment(attempt, rng)
            _fill(filler, room)
            if attempt.wait() == 0:
                raise TooLateError
            _sentence(attempt.said, "no space left")
        finally:
            filler.unlink(missing_ok=True)
    return f"{when}, {room} bytes left"


def files_cannot_grow(run: Victim, rng: random.Random) -> str:
    """Resume with `ulimit -f`, at which no whole checkpoint can be written."""
    limit = rng.randrange(_checkpoint_size(run))
    if run.done >= run.rounds:
        raise TooLateError
    with run.start(limit) as attempt:
        if attempt.wait() == 0:
            raise TooLateError
        _sentence(attempt.said, "")
    return f"no file beyond {limit} bytes"


def checkpoint_is(damage: Callable[[bytearray, random.Random], bytearray]) -> Fault:
    """Kill the run and damage its newest checkpoint: that is noticed, and the one before it is as good."""

    def strike(run: Victim, rng: random.Random) -> str:
        with run.start() as attempt:
            run.moment(attempt, rng, rounds=2)
            attempt.until(lambda: len(run.checkpoints) > 1)  # of a run whose only one is damaged nothing is left
            attempt.hit(signal.SIGKILL)
        newest = run.checkpoints[-1]
        newest.write_bytes(damage(bytearray(newest.read_bytes()), rng))
        with run.start() as attempt:
            if attempt.wait() == 0:
                raise LostError(f"takes {newest.name} for whole")
            _sentence(attempt.said, "is damaged")
        newest.unlink()  # as the sentence says
        return f"that of {newest.stem}"

    return strike


def truncated(content: bytearray, rng: random.Random) -> bytearray:
    return content[: rng.randrange(len(content))]


def flipped(content: bytearray, rng: random.Random) -> bytearray:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


KILLED = "server killed (SIGKILL)"
FAULTS: dict[str, Fault] = {
    KILLED: server_ends_by(signal.SIGKILL),
    "server ended (SIGTERM)": server_ends_by(signal.SIGTERM),
    "worker killed": worker_dies,
    "newest checkpoint truncated": checkpoint_is(truncated),
    "bit of the newest checkpoint flipped": checkpoint_is(flipped),
    "files cannot grow (ulimit -f)": files_cannot_grow,
}
ON_A_SMALL_DISK: dict[str, Fault] = {"disk full (tmpfs)": disk_is_full}


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Make the folder a small disk, if this user may; tell whether it is one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "torture", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def _fill(filler: Path, room: int) -> None:
    """Write as much as there is room for, less `room` bytes."""
    try:
        with filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
    except OSError:
        with filler.open("r+b") as file:
            file.truncate(max(0, filler.stat().st_size - room))


def _checkpoint_size(run: Victim) -> int:
    return max((path.stat().st_size for path in run.checkpoints), default=100_000)


def _sentence(said: str, words: str) -> None:
    *_, last = said.strip().splitlines() or [""]
    if not last.startswith("fedhm: ") or words not in last:
        raise LostError(f"does not say what is wrong ('{words}'), but: {last}")
