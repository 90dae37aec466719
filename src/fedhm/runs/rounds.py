"""What a round leaves on disk: its record, one line of JSON in records.jsonl, and its checkpoint.

A checkpoint is the server's state after the round, in one safetensors file that is written whole or not at all.
"""

import hashlib
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.machine.tensors import read_tensors, update_digest, write_tensors
from fedhm.networks.exchange import Tensors
from fedhm.server.filters.optimizer import Moments
from fedhm.server.record import Record
from fedhm.server.state import flatten, unflatten

FORMAT = "fedhm-checkpoint-2"


class ForeignCheckpointError(FedhmError):
    """An intact checkpoint of another run or another version."""


@dataclass(frozen=True)
class Checkpoint:
    round: int
    state: Any  # the method's
    moments: Moments = field(default_factory=Moments)  # of the server's optimizer


def save_checkpoint(folder: Path, checkpoint: Checkpoint, run: str, keep: int | Literal["all"] = 2) -> None:
    """Write a checkpoint and remove all but the newest `keep`; `run` is the fingerprint of the run."""
    tensors, outline = flatten(checkpoint)
    header = {"format": FORMAT, "round": checkpoint.round, "run": run, "outline": outline}
    write_tensors(_path(folder, checkpoint.round), tensors, {**header, "sha256": _digest(tensors, header)})
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
        return Checkpoint(int(header["round"]), state, unflatten(Moments, tensors, outline["moments"]))
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
    if header.pop("sha256", None) != _digest(tensors, header):
        raise FedhmError(f"the checkpoint {path} is damaged (its checksum differs); {_way_out(path)}")
    if run is not None and header.get("run") != run:
        raise ForeignCheckpointError(
            f"the checkpoint {path} belongs to another run, with other settings, data or initial model"
        )
    return tensors, header


def _way_out(path: Path) -> str:
    if len(existing_checkpoints(path.parent)) > 1:
        return "remove it to resume from the one before"
    return "remove it to start the run again"


def _path(folder: Path, round_number: int) -> Path:
    return folder / f"round-{round_number:06d}.safetensors"


def existing_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest last."""
    return sorted(folder.glob("round-*.safetensors"), key=round_of)


def round_of(path: Path) -> int:
    """Return the round in a checkpoint's name; 0 for other files."""
    number = path.stem.removeprefix("round-")
    return int(number) if number.isdecimal() else 0


def _digest(tensors: Tensors, header: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        update_digest(digest, tensors[name], name)
    return digest.hexdigest()


def append_record(path: Path, record: Record) -> None:
    with path.open("a") as file:
        file.write(record.to_json() + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path) -> list[Record]:
    """Read the records of a run; an unfinished last line does not count."""
    records: list[Record] = []
    if not path.exists():
        return records
    *finished, _ = path.read_bytes().split(b"\n")  # a run may be killed while it writes the last line
    for number, line in enumerate(finished, start=1):
        try:
            records.append(Record.from_json(line))
        except ValueError as error:
            raise FedhmError(f"line {number} of {path} is not a round's record: {error_summary(error)}") from None
        expected = records[0].round + number - 1  # records that were moved aside do not begin with round 1
        if records[-1].round != expected:
            raise FedhmError(f"line {number} of {path} is the record of round {records[-1].round}, not of {expected}")
    return records


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


def write_records(path: Path, records: Sequence[Record]) -> None:
    write_atomically(path, "".join(record.to_json() + "\n" for record in records))
