"""The records of a run on disk, one line of JSON each."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from pydantic import ValidationError

from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.server.record import Record


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
