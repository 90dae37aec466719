"""What a round leaves on disk: its record, one line of JSON in records.jsonl, and its checkpoint.

The lines of records.jsonl form a chain. Each ends with two digests:

- `chain`, of the record without its seconds and of the chain of the line before. The first line follows the run's
  fingerprint. Two runs of the same settings have the same chains.
- `digest`, of the whole line.

So a reader notices a changed, missing or foreign line.

A checkpoint is the server's state after the round, in one sealed safetensors file that is written whole or not at all.
It names the chain of its round's line.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import ValidationError

from fedhm.errors import FedhmError
from fedhm.machine.files import os_error_reason, read_regular, write_atomically
from fedhm.machine.tensors import read_tensors, write_tensors
from fedhm.networks.exchange import Tensors
from fedhm.server.filters.optimizer import Moments
from fedhm.server.record import Record
from fedhm.server.state import flatten, unflatten

FORMAT = "fedhm-checkpoint-3"


class ForeignCheckpointError(FedhmError):
    """An intact checkpoint of another run or another version."""


@dataclass(frozen=True)
class Checkpoint:
    round: int
    state: Any  # the method's
    moments: Moments = field(default_factory=Moments)  # of the server's optimizer
    record: str = field(default="", compare=False)  # the chain of the round's line in records.jsonl


def save_checkpoint(
    folder: Path, checkpoint: Checkpoint, run: str, keep: int | Literal["all"] = 2, record: str = ""
) -> None:
    """Write a checkpoint and remove all but the newest `keep`.

    run     the fingerprint of the run
    record  the chain of the round's line in records.jsonl
    """
    tensors, outline = flatten(checkpoint)
    header = {"format": FORMAT, "round": checkpoint.round, "run": run, "record": record, "outline": outline}
    write_tensors(checkpoint_file(folder, checkpoint.round), tensors, header)
    for old in [] if keep == "all" else existing_checkpoints(folder)[:-keep]:
        old.unlink()


def newest_checkpoint(folder: Path, run: str, state_type: type[Any]) -> Checkpoint | None:
    """Read the last checkpoint in a folder, if there is one; `state_type` is the class of the method's state."""
    existing = existing_checkpoints(folder)
    return _read(existing[-1], run, state_type) if existing else None


def _read(path: Path, run: str, state_type: type[Any]) -> Checkpoint:
    tensors, header = check_checkpoint(path, run)
    try:
        outline = header["outline"]
        state = unflatten(state_type, tensors, outline["state"])
        moments = unflatten(Moments, tensors, outline["moments"])
        return Checkpoint(int(header["round"]), state, moments, str(header["record"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ForeignCheckpointError(
            f"the checkpoint {path} holds the state of another version of the method: {error}"
        ) from None


def check_checkpoint(path: Path, run: str | None) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors and the header of a checkpoint; refuse a damaged one, and one of another run if known."""
    try:
        tensors, header = read_tensors(path)
    except OSError as error:
        raise FedhmError(
            f"the checkpoint {path} cannot be read ({error.strerror or error}); it need not be damaged"
        ) from None
    except ValueError as error:
        raise FedhmError(f"the checkpoint {path} is damaged ({error}); {_way_out(path)}") from None
    if header.get("format") != FORMAT:
        raise FedhmError(f"{path} is not a checkpoint of this library")
    if run is not None and header.get("run") != run:
        raise ForeignCheckpointError(
            f"the checkpoint {path} belongs to another run, with other settings, data or initial model"
        )
    return tensors, header


def _way_out(path: Path) -> str:
    if len(existing_checkpoints(path.parent)) > 1:
        return "remove it to resume from the one before"
    return "remove it to start the run again"


def checkpoint_file(folder: Path, round_number: int) -> Path:
    """Return the path of a round's checkpoint."""
    return folder / f"round-{round_number:06d}.safetensors"


def existing_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest last."""
    return sorted(folder.glob("round-*.safetensors"), key=round_of)


def round_of(path: Path) -> int:
    """Return the round in a checkpoint's name; 0 for other files."""
    number = path.stem.removeprefix("round-")
    return int(number) if number.isdecimal() else 0


@dataclass(frozen=True)
class RecordLine:
    """A line of records.jsonl, whose digest was found to be right."""

    record: Record
    content: bytes  # as it stands on disk, without the line break
    chain: str


_DIGITS = 32  # of a digest, as of a fingerprint
_LINE = re.compile(rb'(\{.*), "chain": "([0-9a-f]{32})", "digest": "([0-9a-f]{32})"\}', re.DOTALL)
_END = len(', "digest": "", "chain": ""}\n') + 2 * _DIGITS  # bytes of a line's end, from the chain on


def append_record(path: Path, record: Record, run: str = "") -> str:
    """Append a record to the chain of a run, and return the chain of its line."""
    with open(path, "a+b", opener=_open_regular_to_append) as file:
        content, chain = chain_line(record.to_json(), _last_chain(file) or run)
        file.write(content + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return chain


def chain_line(text: str, before: str) -> tuple[bytes, str]:
    """Return the line of a record that follows the chain `before`, and the chain up to it."""
    chain = _next_chain(before, text)
    content = f'{text[:-1]}, "chain": "{chain}"'.encode()
    return content + f', "digest": "{_digest(content)}"}}'.encode(), chain


def _open_regular_to_append(name: str, flags: int) -> int:
    """Open a file, but no link: what a run writes must not end up elsewhere."""
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)


def _last_chain(file: BinaryIO) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END))
    found = _LINE.fullmatch(b"{" + file.read().rstrip(b"\n"))
    return found[2].decode() if found else ""


def _next_chain(before: str, text: str | bytes) -> str:
    table = json.loads(text)
    table.pop("seconds", None)  # they differ between runs that are otherwise the same
    return _digest(f"{before}{json.dumps(table)}".encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]


def read_records(path: Path, run: str | None = None) -> list[Record]:
    """Read the records of a run as they were written, or refuse them. With `run`, refuse those of another run."""
    return [line.record for line in read_lines(path, run)]


def read_lines(path: Path, run: str | None = None) -> list[RecordLine]:
    """Read the lines of a run's records; an unfinished last line does not count."""
    lines: list[RecordLine] = []
    try:
        *finished, rest = read_regular(path).split(b"\n")
    except FileNotFoundError:
        return lines
    except OSError as error:
        raise FedhmError(f"cannot read {path}: {os_error_reason(error)}") from None
    for number, content in enumerate(finished, start=1):
        try:
            lines.append(_read_line(content, lines[-1].chain if lines else None))
        except (ValueError, RecursionError) as error:
            raise FedhmError(f"line {number} of {path} is not a round's record: {error_summary(error)}") from None
        last, expected = lines[-1].record, lines[0].record.round + number - 1
        if last.round != expected:  # records that were moved aside do not begin with round 1
            raise FedhmError(f"line {number} of {path} is the record of round {last.round}, not of {expected}")
    if run is not None and lines and lines[0].chain != _next_chain(run, _body(lines[0].content)):
        raise FedhmError(f"{path} holds the records of another run, with other settings, data or initial model")
    # A run may be killed while it writes the last line. But a whole line never ends in anything but a line break.
    if (whole := _LINE.match(rest)) and whole.end() < len(rest):
        raise FedhmError(f"line {len(finished) + 1} of {path} is damaged: it does not end with its digest")
    return lines


def _read_line(content: bytes, before: str | None) -> RecordLine:
    """Read a line that follows the chain `before`; None: that is not known."""
    found = _LINE.fullmatch(content)
    if found is None:
        raise ValueError("it does not end with its digest")
    _, chain, digest = found.groups()
    if _digest(content[: found.end(2) + 1]) != digest.decode():
        raise ValueError("it was changed: its digest differs")
    body = _body(content)
    if before is not None and _next_chain(before, body) != chain.decode():
        raise ValueError("it does not follow the line before, which is of another run or was changed")
    return RecordLine(Record.from_json(body), content, chain.decode())


def _body(content: bytes) -> bytes:
    """Return the record of a whole line, without its digests."""
    found = _LINE.fullmatch(content)
    assert found is not None
    return bytes(found[1]) + b"}"


def write_lines(path: Path, lines: Sequence[RecordLine]) -> None:
    """Write lines as they stood on disk."""
    write_atomically(path, b"".join(line.content + b"\n" for line in lines))


def check_records(file: Path, records: Sequence[Record], headline: str, tiers: Collection[str]) -> None:
    """Refuse records that do not begin with round 1, have other tiers, or lack the headline metric."""
    if records and records[0].round != 1:
        raise FedhmError(f"line 1 of {file} is the record of round {records[0].round}, not of the first")
    for record in records:
        for found in (record.metrics, record.clients):
            if found and (odd := found.keys() ^ set(tiers)):
                raise FedhmError(f"round {record.round} of {file} and the run have other tiers: {min(odd)}")
        if any(headline not in metrics for metrics in record.all_metrics()):
            raise FedhmError(f"round {record.round} of {file} does not have the {headline} of every model")


def error_summary(error: Exception) -> str:
    """Return an error in one line."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ")
    return str(error)
