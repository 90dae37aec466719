"""What a run's folder states of the run: its settings, and which versions of this library began and resumed it.

Settings that came up later are not stated there. They are read as what the library did before it had them, which each
section knows (`Section.as_before`), and are no part of what identifies the run.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from torch import nn

from fedhm.config.loading import parse_begun, read_text
from fedhm.config.schema import Config, ResolvedConfig
from fedhm.errors import FedhmError
from fedhm.machine.files import check_folder, check_name, make_folder, take_lock, write_atomically
from fedhm.machine.printable import pasteable
from fedhm.measure.cost import Cost
from fedhm.runs.checkpoint import (
    Checkpoint,
    ForeignCheckpointError,
    check_checkpoint,
    existing_checkpoints,
    newest_checkpoint,
    round_of,
    save_checkpoint,
)
from fedhm.runs.fingerprint import DataFacts
from fedhm.runs.identities import IDENTITIES_FILE
from fedhm.runs.models import best_round_of, save_tier, tier_file
from fedhm.runs.privacy import ROUNDS_FILE, SECRET_FILE, check_none_repeats, kept_secret, note_released
from fedhm.runs.records import append_record, check_whole, in_brief, read_records, write_records
from fedhm.server.record import Record

CONFIG_FILE = "config.toml"
_SIGNATURE = re.compile(r"^# fedhm (\S+) ", re.MULTILINE)


@dataclass(frozen=True)
class Begun:
    config: ResolvedConfig
    stated: Mapping[str, Any]  # the settings that the folder states, by section
    versions: tuple[str, ...]  # that began and resumed the run; none: one from before they were written

    @property
    def remark(self) -> str:
        """Return, for a sentence that refuses the folder, which other version wrote it; nothing if it was this one."""
        return _remark(self.versions)

    def settled(self, given: Config) -> Config:
        """Return settings in which all that the folder does not state, and nobody has set, is as it was before."""
        changes: dict[str, Any] = {}
        for name in Config.model_fields:
            old, new = getattr(self.config, name), getattr(given, name)
            if type(old) is not type(new) or not hasattr(new, "as_before"):
                continue
            kept = {
                key: getattr(old, key)
                for key, field in type(new).model_fields.items()
                if key not in self.stated.get(name, ())
                and getattr(new, key) == field.get_default(call_default_factory=True)
            }
            changes[name] = new.model_copy(update=kept)
        return given.model_copy(update=changes)

    def difference(self, given: Config) -> str:
        """Return the first setting that makes it another run, as part of a sentence; empty if there is none."""
        old, new = self.config.without_place().dotted(), given.without_place().dotted()
        for key in (*new, *old):
            if old.get(key) != new.get(key):
                return f"{key} = {old.get(key, 'nothing')}, not {new.get(key, 'nothing')}"
        return ""


def read_begun(path: Path) -> Begun:
    """Read what the folder of a run states."""
    check_name(path)
    file = path / CONFIG_FILE
    if not file.exists():
        raise FedhmError(f"{path} is not the folder of a run: {_what_is_there(path)}")
    text = read_text(file)
    versions = tuple(_SIGNATURE.findall(text))
    try:
        return Begun(*parse_begun(text, str(file)), versions)
    except FedhmError as error:
        raise FedhmError(f"{error}{_remark(versions)}") from None


def _what_is_there(path: Path) -> str:
    if not path.exists():
        return "there is no such folder"
    if not path.is_dir():
        return "it is a file"
    within = min(path.glob(f"*/{CONFIG_FILE}"), default=None)
    return (
        f"there is no {CONFIG_FILE} in it" if within is None else f"it holds runs, of which name one: {within.parent}"
    )


def write_begun(path: Path, config: ResolvedConfig) -> None:
    """Write the settings of a run that this version begins."""
    write_atomically(path / CONFIG_FILE, f"# fedhm {version('fedhm')} began this run\n{config.to_toml()}")


def note_resumed(path: Path, begun: Begun, done: int) -> None:
    """Note in a run's folder that this version resumes it, if another one wrote the rounds before."""
    if begun.versions[-1:] != (version("fedhm"),):
        text = read_text(path / CONFIG_FILE)
        signatures = [match.end() for match in _SIGNATURE.finditer(text)]
        end = text.find("\n", signatures[-1]) + 1 if signatures else 0
        note = f"# fedhm {version('fedhm')} resumed it after round {done}\n"
        write_atomically(path / CONFIG_FILE, text[:end] + note + text[end:])


def _remark(versions: tuple[str, ...]) -> str:
    own = version("fedhm")
    if versions[-1:] == (own,):
        return ""
    writer = f"fedhm {versions[-1]}" if versions else "an earlier version of fedhm, which did not sign it"
    return f" (the folder was written by {writer}, this is fedhm {own})"


# Rounds that are taken back: what came of them lies beside the run from then on, and is not lost.


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


# A run's folder: resolved config, records, checkpoints, final models. Written by one process at a time.

TRACKING = "tracking.json"  # which tracked runs it has: `tracking/tracker.py` writes it
LOCK = ".lock"  # stays in the folder, and means nothing unless a process holds it


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun: Begun
        self._new = False  # made by this process
        make_folder(path)
        lock = take_lock(path / LOCK)
        if lock is None:
            raise FedhmError(f"another process is running in {path}")
        self._lock = lock

    @staticmethod
    def check_free(path: Path) -> None:
        check_name(path)
        check_folder(path)
        if (path / "config.toml").exists():
            command = pasteable("fedhm", "resume", path)
            raise FedhmError(f"{path} holds a run already: resume it with {command}, or choose another folder")
        if path.is_dir() and any(entry.name != LOCK and not entry.name.endswith(".tmp") for entry in path.iterdir()):
            raise FedhmError(f"{path} holds other files: choose an empty or a new folder")

    @classmethod
    def create(cls, path: Path, config: ResolvedConfig) -> "RunFolder":
        cls.check_free(path)
        folder = cls(path)
        try:
            folder.begin_with(config)
        except BaseException:
            folder.__exit__()
            raise
        folder._new = True
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        begun = read_begun(path)
        folder = cls(path)
        folder.begun = begun
        return folder

    @property
    def models(self) -> Path:
        return self.path / "models"

    @property
    def config(self) -> ResolvedConfig:
        return self.begun.config

    def begin_with(self, config: ResolvedConfig) -> None:
        """Give a run of which no round is done yet other settings."""
        write_begun(self.path, config)
        self.begun = read_begun(self.path)

    def stated_with_plan(self, config: ResolvedConfig) -> Mapping[str, Any]:
        """Write down which tier each client has by its device, if that is new; return all that the folder states."""
        if self.config.federation.plan != config.federation.plan:  # found out when the run was put together
            self.begin_with(config)
        return self.begun.stated

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def restore(
        self, run: str, state_type: type[Any], tiers: Collection[str]
    ) -> tuple[Checkpoint | None, list[Record]]:
        """Return the last checkpoint and the records up to it. Remove those of rounds without a finished checkpoint."""
        try:
            checkpoint = newest_checkpoint(self.path / "checkpoints", run, state_type)
        except ForeignCheckpointError as error:
            raise FedhmError(f"{error}{self.begun.remark}") from None
        done, file = checkpoint.round if checkpoint else 0, self.path / "records.jsonl"
        records = read_records(file)
        check_whole(file, records, self.config.objective.headline.name, tiers)
        if not done and (found := self._results(records)):
            raise FedhmError(
                f"{found}, but there is no checkpoint in {self.path}/checkpoints: put one back to resume the run, or "
                "start it again in another folder"
            )
        if self.config.privacy.active:
            check_none_repeats(self.path, done)
        if [record.round for record in records[:done]] != list(range(1, done + 1)):
            raise FedhmError(f"{file} does not hold the {done} rounds that the checkpoint has seen")
        if len(records) > done + 1:  # somebody has removed checkpoints; one record more is that of a killed round
            self._check_repeatable()
            set_aside(self.path, done, records)
        write_records(file, records[:done])
        if not self._new:
            note_resumed(self.path, self.begun, done)
        return checkpoint, records[:done]

    def _results(self, records: Sequence[Record]) -> str:
        """Return which results are there that one killed in its first round cannot have, to begin a sentence."""
        if len(records) > 1:  # of the first round, a run that was killed may have left the record alone
            return f"{self.path}/records.jsonl names {len(records)} rounds"
        # the models of the first round as the best one are written before its record
        models = any(best_round_of(path) != 1 for path in self.models.glob("*"))
        report = (self.path / "report.md").exists()
        return f"{self.path} holds the {'models' if models else 'report'} of a run" if models or report else ""

    def take_back(self, last: int, run: str | None = None) -> None:
        """Make the run one that has done `last` rounds: what came of later ones is moved aside.

        run  identifies the run that is to be resumed from there, if that is known: it is refused before anything moves
        """
        self._check_repeatable()
        existing = {round_of(path): path for path in existing_checkpoints(self.path / "checkpoints")}
        if last not in existing:
            there = f"only of {' and '.join(map(str, existing))}" if existing else "nor of any other"
            raise FedhmError(
                f"{self.path} has no checkpoint of round {last}, {there}; a run keeps more with checkpoints.keep"
            )
        try:
            check_checkpoint(existing[last], run)
        except ForeignCheckpointError as error:
            raise FedhmError(f"{error}{self.begun.remark}") from None
        set_aside(self.path, last, read_records(self.path / "records.jsonl"))

    def _check_repeatable(self) -> None:
        if self.config.privacy.active:  # what came of a round could be told apart from what comes of it a second time
            raise FedhmError(
                f"{self.path} holds a private run, of which no round can be taken back: its ε counts each of them "
                "once; start another run"
            )

    def secret(self, *, begun: bool) -> bytes:
        """Return the secret that a private run's noise follows from; it is made before any round has `begun`."""
        return kept_secret(self.path, begun)

    def commit(self, record: Record, checkpoint: Checkpoint, run: str, keep: int | Literal["all"]) -> None:
        """Write a round's record and checkpoint. The checkpoint comes last: it is what makes the round count."""
        append_record(self.path / "records.jsonl", record)
        save_checkpoint(self.path / "checkpoints", checkpoint, run, keep)
        if self.config.privacy.active:
            note_released(self.path, checkpoint.round)

    def remove_if_nothing_was_done(self) -> None:
        """Remove a run that failed in its first round: it leaves nothing to resume, and would stand in the way."""
        if self._new and not list(self.path.glob("checkpoints/*.safetensors")):
            for name in (
                "config.toml",
                "records.jsonl",
                "tiers.json",
                "plans.json",
                "data.json",
                SECRET_FILE,
                ROUNDS_FILE,
                IDENTITIES_FILE,
                TRACKING,
            ):
                (self.path / name).unlink(missing_ok=True)
            if [entry.name for entry in self.path.iterdir()] == [LOCK]:
                with suppress(OSError):  # Windows removes no open file, and a folder that holds the lock alone is free
                    (self.path / LOCK).unlink()
                    self.path.rmdir()

    def save_costs(self, costs: dict[str, Cost]) -> None:
        write_atomically(self.path / "tiers.json", json.dumps({t: vars(cost) for t, cost in costs.items()}, indent=2))

    def save_plans(self, plans: Mapping[str, Mapping[str, int]]) -> None:
        """Write the ranks of tiers that are budgets, as they are now; records have those of earlier rounds."""
        write_atomically(self.path / "plans.json", json.dumps({t: dict(plan) for t, plan in plans.items()}, indent=2))

    def save_data_facts(self, facts: DataFacts) -> None:
        write_atomically(self.path / "data.json", json.dumps(vars(facts), indent=2))

    def save_models(self, networks: dict[str, nn.Module]) -> None:
        for tier, network in networks.items():
            save_tier(tier_file(self.models, tier), network, tier)


def how_to_resume(path: Path) -> str:
    """Return the end of a sentence that says why a run stopped."""
    return f"; {pasteable('fedhm', 'resume', path)} resumes from the last complete round"


def rounds_done(path: Path) -> int:
    """Count the records that a run has written, also while another process writes them."""
    file = path / "records.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def is_complete(path: Path, config: Config) -> bool:
    """Say whether all rounds are done that are to be, and every tier's model and the report are on disk."""
    done = rounds_done(path) >= config.train.rounds or (config.stop.active and _stopped(path))
    if not done or not (path / "report.md").exists():
        return False
    return all(tier_file(path / "models", tier).exists() for tier in read_costs(path))


def _stopped(path: Path) -> bool:
    records = read_records(path / "records.jsonl")
    return bool(records) and bool(records[-1].stopped)


def read_config(path: Path) -> ResolvedConfig:
    return read_begun(path).config


def read_costs(path: Path) -> dict[str, Cost]:
    """Read the cost of every tier, as a run wrote them at its start."""
    file = path / "tiers.json"
    try:
        costs = TypeAdapter(dict[str, Cost]).validate_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise FedhmError(f"cannot read {file}: {in_brief(error)}") from None
    if not costs:
        raise FedhmError(f"{file} names no tier")
    return costs


def read_data_facts(path: Path) -> DataFacts | None:
    """Read the facts of a run's data; None for a run from before they were written."""
    file = path / "data.json"
    if not file.exists():
        return None
    try:
        return TypeAdapter(DataFacts).validate_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise FedhmError(f"cannot read {file}: {in_brief(error)}") from None
