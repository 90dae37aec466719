"""Folders of finished runs are changed at random. Every verb then gives the right result or one sentence.

The claim is that no file of a run is ever read wrong: `verify` finds the change, `report`, `export` and `resume` end as
they do on the intact folder, or refuse in one sentence.
"""

import contextlib
import io
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhm.cli import main
from fedhm.errors import FedhmError
from fedhm.export.source import sources_from_run
from run_outcome import outcome
from torture.tally import LostError, Tally

SETTINGS = [
    *("data.train_samples=160", "federation.clients=2", "federation.participation=1.0", "train.epochs=1"),
    *("train.rounds=3", "evaluation.every=1", "stop.patience=5", "engine.workers=1", "engine.threads=1"),
    "engine.server_threads=1",
]
DEADLINE = 60  # seconds that a verb may take: a pipe in place of a file must not hang it
LOCK = ".lock"  # holds nothing


class UnfitError(Exception):
    """Raised if a mutation cannot be applied to a file, or would leave it as it is."""


Mutation = Callable[[Path, Path, random.Random], None]  # a file, its counterpart in another run, chance


# ---- bytes ----


def _edit(change: Callable[[bytearray, random.Random], bytes | bytearray]) -> Mutation:
    def mutate(file: Path, _: Path, rng: random.Random) -> None:
        before = file.read_bytes()
        if not before or (after := bytes(change(bytearray(before), rng))) == before:
            raise UnfitError
        file.write_bytes(after)

    return mutate


def _flip(content: bytearray, rng: random.Random) -> bytearray:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


def _replace_byte(content: bytearray, rng: random.Random) -> bytearray:
    content[rng.randrange(len(content))] = rng.randrange(256)
    return content


def _truncate(content: bytearray, rng: random.Random) -> bytearray:
    return content[: rng.randrange(len(content))]


def _append(content: bytearray, rng: random.Random) -> bytearray:
    return content + rng.randbytes(rng.randint(1, 20))


def _insert(content: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(len(content))
    return content[:at] + rng.randbytes(rng.randint(1, 8)) + content[at:]


def _remove_bytes(content: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(len(content))
    return content[:at] + content[at + rng.randint(1, 8) :]


def _zero_block(content: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(len(content))
    end = min(len(content), at + rng.choice([16, 512, 4096]))
    content[at:end] = bytes(end - at)
    return content


def _change_digit(content: bytearray, rng: random.Random) -> bytearray:
    """Change a digit in text: a number stays a number."""
    places = [match.start() for match in re.finditer(rb"\d", content)]
    if not places:
        raise UnfitError
    content[rng.choice(places)] = rng.choice(b"0123456789")
    return content


def _change_word(content: bytearray, rng: random.Random) -> bytearray:
    """Change a letter of a name or text in quotes: JSON stays JSON."""
    places = [match.start() + 1 for match in re.finditer(rb'"[A-Za-z/_]', content)]
    if not places:
        raise UnfitError
    content[rng.choice(places)] = rng.choice(b"abcdefghijklmnopqrstuvwxyz")
    return content


def _lines(change: Callable[[list[bytes], random.Random], list[bytes]]) -> Mutation:
    def edit(content: bytearray, rng: random.Random) -> bytes:
        lines = bytes(content).splitlines(keepends=True)
        if len(lines) < 2:
            raise UnfitError
        return b"".join(change(lines, rng))

    return _edit(edit)


def _drop_line(lines: list[bytes], rng: random.Random) -> list[bytes]:
    del lines[rng.randrange(len(lines))]
    return lines


def _repeat_line(lines: list[bytes], rng: random.Random) -> list[bytes]:
    at = rng.randrange(len(lines))
    return [*lines[:at], lines[at], *lines[at:]]


def _swap_lines(lines: list[bytes], rng: random.Random) -> list[bytes]:
    one, other = rng.sample(range(len(lines)), 2)
    lines[one], lines[other] = lines[other], lines[one]
    return lines


# ---- files ----


def _remove(file: Path, _: Path, __: random.Random) -> None:
    file.unlink()


def _of_another_run(file: Path, other: Path, _: random.Random) -> None:
    if not other.exists() or other.read_bytes() == file.read_bytes():
        raise UnfitError
    shutil.copy(other, file)


def _of_a_neighbour(file: Path, _: Path, rng: random.Random) -> None:
    """Exchange a model or checkpoint for that of another tier or round."""
    others = [each for each in sorted(file.parent.glob("*.safetensors")) if each != file and each.is_file()]
    if file.suffix != ".safetensors" or not others:
        raise UnfitError
    shutil.copy(rng.choice(others), file)


def _folder_instead(file: Path, _: Path, __: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _pipe_instead(file: Path, _: Path, __: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def _dangling_link(file: Path, _: Path, __: random.Random) -> None:
    file.unlink()
    file.symlink_to(file.parent / "gone")


MUTATIONS: dict[str, Mutation] = {
    "bit flipped": _edit(_flip),
    "byte replaced": _edit(_replace_byte),
    "truncated": _edit(_truncate),
    "emptied": _edit(lambda *_: b""),
    "bytes appended": _edit(_append),
    "bytes inserted": _edit(_insert),
    "bytes removed": _edit(_remove_bytes),
    "block of zeros": _edit(_zero_block),
    "digit changed": _edit(_change_digit),
    "letter changed": _edit(_change_word),
    "line removed": _lines(_drop_line),
    "line repeated": _lines(_repeat_line),
    "lines exchanged": _lines(_swap_lines),
    "file removed": _remove,
    "file of another seed": _of_another_run,
    "file of another tier or round": _of_a_neighbour,
    "folder in its place": _folder_instead,
    "pipe in its place": _pipe_instead,
    "link to nothing": _dangling_link,
}


# ---- verbs ----


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def call(*words: str) -> Said:
    """Run a verb in this process, within the deadline."""
    out, err = io.StringIO(), io.StringIO()

    def late(*_: object) -> None:
        raise LostError(f"{words[0]} hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(DEADLINE)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    except (LostError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise LostError(f"{words[0]} raises {type(error).__name__}: {error}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return Said(code, out.getvalue(), err.getvalue())


def _refused(said: Said, verb: str) -> bool:
    """Tell whether a verb refused in one sentence; raise if it failed in any other way."""
    if said.code == 0:
        return False
    *_, last = said.err.strip().splitlines() or [""]
    if not last.startswith("fedhm: ") or "Traceback" in said.err:
        raise LostError(f"{verb} does not say in a sentence what is wrong, but: {said.err[-300:]}")
    return True


@dataclass(frozen=True)
class Reference:
    """An intact run, what verbs make of it, and another run with the same settings and another seed."""

    folder: Path
    other: Path
    report: dict[str, bytes]
    outcome: dict[str, Any]
    exported: dict[str, bytes]


def make_reference(scratch: Path) -> Reference:
    folders = scratch / "reference" / "run", scratch / "other" / "run"
    for seed, folder in enumerate(folders):
        said = call("run", "digits", "--set", *SETTINGS, f"seed={seed}", "--out", str(folder))
        assert said.code == 0, said.err
    folder, other = folders
    report = _report(folder, scratch / "reference" / "report")
    exported = _export(folder)
    assert report is not None
    assert exported is not None
    return Reference(folder, other, report, outcome(folder), exported)


def _report(run: Path, out: Path) -> dict[str, bytes] | None:
    """Return the tables of a report; None if the run is refused."""
    if _refused(call("report", str(run), "--out", str(out)), "report"):
        return None
    return {name: (out / name).read_bytes() for name in ("report.md", "report.csv")}


def _export(run: Path) -> dict[str, bytes] | None:
    """Return the weights that `export` would write; None if it refuses the run. Writing them takes long."""
    try:
        sources = sources_from_run(run)
    except FedhmError:
        return None
    except Exception as error:
        raise LostError(f"export raises {type(error).__name__}: {error}") from error
    return {
        f"{source.name} {name}": tensor.numpy().tobytes()
        for source in sources
        for name, tensor in source.network.state_dict().items()
    }


@dataclass(frozen=True)
class Hit:
    """What was done to a folder."""

    mutation: str
    file: str
    refused_by: tuple[str, ...] = ()  # the verbs that refused it; the others gave the right result
    problem: str = ""  # a verb took the change for right, or failed in another way than by a sentence


def hit(reference: Reference, scratch: Path, rng: random.Random) -> Hit:
    """Change a file of a copy of the run, and see what every verb makes of it."""
    folder = scratch / "run"
    while True:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(reference.folder, folder)
        files = [each for each in sorted(folder.rglob("*")) if each.is_file() and each.name != LOCK]
        file, name = rng.choice(files), rng.choice(list(MUTATIONS))
        relative = file.relative_to(folder)
        with contextlib.suppress(UnfitError):
            MUTATIONS[name](file, reference.other / relative, rng)
            break
    try:
        return Hit(name, relative.as_posix(), tuple(_refusals(reference, folder, scratch)))
    except LostError as error:
        return Hit(name, relative.as_posix(), problem=f"{relative.as_posix()}: {error}")


def _refusals(reference: Reference, folder: Path, scratch: Path) -> Iterator[str]:
    """Call every verb on a changed folder, and yield which of them refused it."""
    said = call("verify", str(folder))
    if not _refused(said, "verify"):
        raise LostError("verify does not find it")
    yield "verify"
    report = _report(folder, scratch / "report")
    if report is None:
        yield "report"
    elif report != reference.report:
        raise LostError("report shows other numbers")
    exported = _export(folder)
    if exported is None:
        yield "export"
    elif exported != reference.exported:
        raise LostError("export writes other weights")
    if _refused(call("resume", str(folder)), "resume"):
        yield "resume"
    else:
        found = outcome(folder)
        if different := [name for name in reference.outcome if found.get(name) != reference.outcome[name]]:
            raise LostError(f"resume ends otherwise: {', '.join(different)}")


def torture_folders(scratch: Path, rng: random.Random, tally: Tally, count: int) -> None:
    """Mutate run folders `count` times."""
    tally.tell("two runs whose folders are changed")
    reference = make_reference(scratch)
    for number in range(1, count + 1):
        found = hit(reference, scratch / "mutated", rng)
        tally.counted(f"a run's file: {found.mutation}", found.problem)
        if number % 100 == 0:
            tally.tell(f"{number} of {count} folders were changed")
