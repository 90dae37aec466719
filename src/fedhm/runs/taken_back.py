"""Rounds that are taken back: what came of them lies beside the run from then on, and is not lost."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from fedhm.runs.checkpoint import existing_checkpoints, round_of
from fedhm.runs.records import write_records
from fedhm.server.record import Record


def set_aside(path: Path, last: int, records: Sequence[Record]) -> None:
    """Move the records, checkpoints and models of all rounds after `last` to a folder of their own in a run's folder.

    Checkpoints go before the run's records are cut, the newest first: if that is interrupted, what is left is a run
    that was interrupted after some later round.
    """
    place = next(place for number in count(1) if not (place := path / f"taken-back-{number}").exists())
    write_records(place / "records.jsonl", records[last:])
    for checkpoint in reversed(existing_checkpoints(path / "checkpoints")):
        if round_of(checkpoint) > last:
            (place / "checkpoints").mkdir(exist_ok=True)
            checkpoint.rename(place / "checkpoints" / checkpoint.name)
    if (path / "models").is_dir():
        (path / "models").rename(place / "models")
    write_records(path / "records.jsonl", records[:last])
