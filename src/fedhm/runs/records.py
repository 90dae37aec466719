"""The records of a run on disk, one line of JSON each."""

import os
from pathlib import Path

from fedhm.errors import FedhmError
from fedhm.server.record import Record


def append_record(path: Path, record: Record) -> None:
    with path.open("a") as file:
        file.write(record.to_json() + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path) -> list[Record]:
    """Read the records of a run, up to the first line that was not finished."""
    records: list[Record] = []
    if not path.exists():
        return records
    for number, line in enumerate(path.read_text().splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break  # the run was killed while it wrote this line
        try:
            records.append(Record.from_json(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FedhmError(f"line {number} of {path} is not a round's record: {error}") from None
    return records
