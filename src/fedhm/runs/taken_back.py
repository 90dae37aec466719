"""Rounds that are taken back: what came of them lies beside the run from then on, and is not lost."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from fedhm.runs.best_models import best_round_of
from fedhm.runs.checkpoint import existing_checkpoints, round_of
from fedhm.runs.records import write_records
from fedhm.server.record import Record


def set_aside(path: Path, last: int, records: Sequence[Record]) -> None:
    """Move the records, checkpoints and models of all rounds after `last` to a folder of their own in a run's folder.

    The models of a best round that stays are not moved; if there is nothing to move, nothing is done.

    Checkpoints go before the run's records are cut, the newest first: if that is interrupted, what is left is a run
    that was interrupted after some later round.
    """
    later = [each for each in existing_checkpoints(path / "checkpoints") if round_of(each) > last]
    if not later and not records[last:]:
        return
    place = next(place for number in count(1) if not (place := path / f"taken-back-{number}").exists())
    write_records(place / "records.jsonl", records[last:])
    for checkpoint in reversed(later):
        (place / "checkpoints").mkdir(exist_ok=True)
        checkpoint.rename(place / "checkpoints" / checkpoint.name)
    for model in list((path / "models").glob("*")):
        if not 1 <= best_round_of(model) <= last:
            (place / "models").mkdir(exist_ok=True)
            model.rename(place / "models" / model.name)
    write_records(path / "records.jsonl", records[:last])
