"""A run's folder: settings, records, checkpoints and models. One process writes it at a time."""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter
from torch import nn

from fedhm.config.loading import parse_resolved, parse_toml, read_text
from fedhm.config.objective import Metric
from fedhm.config.placeholder import stand_in
from fedhm.config.schema import Config, ResolvedConfig
from fedhm.errors import FedhmError
from fedhm.machine.files import (
    check_folder,
    check_utf8_name,
    make_folder,
    os_error_reason,
    read_regular,
    take_lock,
    write_atomically,
)
from fedhm.machine.printable import quoted_command
from fedhm.machine.seal import UNSEALED, read_sealed, read_sealed_json, seal, seal_again, write_sealed_json
from fedhm.measure.cost import Cost
from fedhm.runs.fingerprint import DataFacts
from fedhm.runs.identities import IDENTITIES_FILE
from fedhm.runs.models import best_round_of, save_tier, tier_file
from fedhm.runs.privacy import ROUNDS_FILE, SECRET_FILE, check_no_round_repeats, read_secret, write_round_count
from fedhm.runs.rounds import (
    Checkpoint,
    ForeignCheckpointError,
    RecordLine,
    append_record,
    check_checkpoint,
    check_records,
    error_summary,
    existing_checkpoints,
    newest_checkpoint,
    read_lines,
    read_records,
    round_of,
    save_checkpoint,
    write_lines,
)
from fedhm.server.record import Record

CONFIG_FILE = "config.toml"
RECORDS_FILE = "records.jsonl"
COSTS_FILE = "tiers.json"
PLANS_FILE = "plans.json"
DATA_FILE = "data.json"
FORMAT = 3  # of the whole folder; the first line of config.toml names it
_SIGNATURE = re.compile(r"^# fedhm (\S+) ", re.MULTILINE)
_FORMAT_NAMED = re.compile(r"^# fedhm \S+ began this run \(folder format (\d+)\)$", re.MULTILINE)


@dataclass(frozen=True)
class RunFacts:
    """The content of data.json: which run it is, and on which data. Files that name another run do not belong to it."""

    run: str  # the fingerprint of the run
    settings: str  # a digest of the settings in config.toml
    data: DataFacts
    metrics: tuple[Metric, ...] = ()  # of the objective, which a reader may not know


@dataclass(frozen=True)
class CostsFile:
    """The content of tiers.json."""

    run: str
    tiers: dict[str, Cost]


Facts = TypeVar("Facts", RunFacts, CostsFile)


@dataclass(frozen=True)
class RunSettings:
    """The settings in a run's folder, and the versions of this library that wrote there."""

    config: ResolvedConfig
    versions: tuple[str, ...]  # the one that began the run, then those that resumed it
    digest: str  # of the settings, as they are written

    @property
    def version_remark(self) -> str:
        """Return which other version wrote the folder, to end a refusal; empty if it was this one."""
        return _version_remark(self.versions)

    def difference(self, given: Config) -> str:
        """Return the first setting that makes it another run, as part of a sentence; empty if there is none."""
        old, new = self.config.without_location().dotted(), given.without_location().dotted()
        for key in (*new, *old):
            if old.get(key) != new.get(key):
                return f"{key} = {old.get(key, 'nothing')}, not {new.get(key, 'nothing')}"
        return ""


def read_settings(path: Path) -> RunSettings:
    """Read the settings in a run's folder; a folder in another format is refused."""
    check_utf8_name(path)
    file = path / CONFIG_FILE
    if not file.exists():
        raise FedhmError(f"{path} is not the folder of a run: {_what_is_there(path)}")
    text = read_text(file)
    versions = tuple(_SIGNATURE.findall(text))
    found = _FORMAT_NAMED.search(text)
    if found is None or int(found[1]) != FORMAT:
        written = f"in folder format {found[1]}" if found else "by a version of fedhm before 0.2"
        raise FedhmError(
            f"{path} was written {written}, and fedhm {version('fedhm')} reads format {FORMAT} only: use the version "
            "that wrote it, or start the run again in another folder"
        )
    try:
        read_sealed(file)
        stand_in(parse_toml(text, str(file)), _metrics_of(path))
        return RunSettings(parse_resolved(text, str(file)), versions, _digest_of_settings(text))
    except ValueError as error:
        raise FedhmError(
            f"{file} is damaged, or was changed by hand ({error}): put it back as it was; to run with other settings, "
            f"use it as the config of a new run, {quoted_command('fedhm', 'run', file)}"
        ) from None
    except FedhmError as error:
        raise FedhmError(f"{error}{_version_remark(versions)}") from None


def _metrics_of(path: Path) -> tuple[Metric, ...]:
    """Return the metrics that a run wrote at its start; empty if it wrote none yet."""
    try:
        return read_run_facts(path).metrics
    except FedhmError:  # whoever needs the file says what is wrong with it
        return ()


def _what_is_there(path: Path) -> str:
    if not path.exists():
        return "there is no such folder"
    if not path.is_dir():
        return "it is a file"
    within = min(path.glob(f"*/{CONFIG_FILE}"), default=None)
    return (
        f"there is no {CONFIG_FILE} in it" if within is None else f"it holds runs, of which name one: {within.parent}"
    )


def _write_settings(path: Path, config: ResolvedConfig) -> None:
    """Write the settings of a run that this version begins."""
    first = f"# fedhm {version('fedhm')} began this run (folder format {FORMAT})"
    text = f"{first}\n# {UNSEALED} of this file: a changed one is refused\n{config.to_toml()}"
    write_atomically(path / CONFIG_FILE, seal(text.encode()))


def _digest_of_settings(text: str) -> str:
    """Return a digest of a config file without its comments. Later versions read the same text, and get the same."""
    settings = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return hashlib.sha256(settings.encode()).hexdigest()[:32]


def _note_resumed(path: Path, versions: tuple[str, ...], done: int) -> None:
    """Add this version to the head of config.toml, unless it was the last one to write there."""
    if versions[-1:] != (version("fedhm"),):
        text = read_text(path / CONFIG_FILE)
        last = [match.end() for match in _SIGNATURE.finditer(text)][-1]
        end = text.find("\n", last) + 1
        note = f"# fedhm {version('fedhm')} resumed it after round {done}\n"
        write_atomically(path / CONFIG_FILE, seal_again((text[:end] + note + text[end:]).encode()))


def _version_remark(versions: tuple[str, ...]) -> str:
    own = version("fedhm")
    return "" if versions[-1:] == (own,) else f" (the folder was written by fedhm {versions[-1]}, this is fedhm {own})"


def _move_rounds_aside(path: Path, last: int, lines: Sequence[RecordLine]) -> None:
    """Move records, checkpoints and models of all rounds after `last` to a new folder, taken-back-N, in the run's.

    The models of a best round up to `last` stay. Checkpoints move before the run's records are cut, the newest first:
    if that is interrupted, a run is left that was interrupted after some later round.
    """
    later = [each for each in existing_checkpoints(path / "checkpoints") if round_of(each) > last]
    if not later and not lines[last:]:
        return
    place = next(place for number in count(1) if not (place := path / f"taken-back-{number}").exists())
    write_lines(place / RECORDS_FILE, lines[last:])
    for checkpoint in reversed(later):
        (place / "checkpoints").mkdir(exist_ok=True)
        checkpoint.rename(place / "checkpoints" / checkpoint.name)
    for model in list((path / "models").glob("*")):
        if not 1 <= best_round_of(model) <= last:
            (place / "models").mkdir(exist_ok=True)
            model.rename(place / "models" / model.name)
    write_lines(path / RECORDS_FILE, lines[:last])


TRACKING = "tracking.json"  # ids of the run in trackers: `tracking/tracker.py` writes it
LOCK = ".lock"  # stays in the folder; it means nothing unless a process holds it


class RunFolder:
    """The folder of a run, open in this process. A lock keeps others from writing there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: RunSettings
        self.run = ""  # the fingerprint of the run, once it is known
        self._new = False  # made by this process
        make_folder(path)
        lock = take_lock(path / LOCK)
        if lock is None:
            raise FedhmError(f"another process is running in {path}")
        self._lock = lock

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuse a path that holds a run or other files, or that cannot be a folder."""
        check_utf8_name(path)
        check_folder(path)
        if (path / "config.toml").exists():
            command = quoted_command("fedhm", "resume", path)
            raise FedhmError(f"{path} holds a run already: resume it with {command}, or choose another folder")
        if path.is_dir() and any(entry.name != LOCK and not entry.name.endswith(".tmp") for entry in path.iterdir()):
            raise FedhmError(f"{path} holds other files: choose an empty or a new folder")

    @classmethod
    def create(cls, path: Path, config: ResolvedConfig) -> "RunFolder":
        cls.check_free(path)
        folder = cls(path)
        try:
            folder.write_config(config)
        except BaseException:
            folder.__exit__()
            raise
        folder._new = True
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        settings = read_settings(path)
        folder = cls(path)
        folder.settings = settings
        return folder

    @property
    def models(self) -> Path:
        return self.path / "models"

    @property
    def config(self) -> ResolvedConfig:
        return self.settings.config

    def write_config(self, config: ResolvedConfig) -> None:
        """Give the run other settings, before its first round."""
        _write_settings(self.path, config)
        self.settings = read_settings(self.path)

    def lengthen(self, rounds: int) -> None:
        """Give the run more rounds than it began with. Its records and checkpoints stay what they are."""
        train = self.config.train
        if rounds == train.rounds:
            return
        if rounds < train.rounds:
            raise FedhmError(
                f"{self.path} has {train.rounds} rounds, and a run can only become longer: to repeat its last rounds, "
                "resume from an earlier one"
            )
        if self.config.privacy.active:
            raise FedhmError(
                f"{self.path} holds a private run, whose ε is for {train.rounds} rounds: start another run"
            )
        if train.schedule == "cosine":
            raise FedhmError(
                f"the learning rate of {self.path} ends with round {train.rounds} (train.schedule = 'cosine'): start "
                f"another run with train.rounds = {rounds}"
            )
        if _stopped(self.path):
            raise FedhmError(f"{self.path} stopped early, by [stop]: more rounds would not change that")
        more = {"rounds": rounds, "begun_rounds": train.begun_rounds or train.rounds}
        config = self.config.model_copy(update={"train": train.model_copy(update=more)})
        head = [line for line in read_text(self.path / CONFIG_FILE).splitlines() if line.startswith("#")]
        text = "\n".join([*head, config.to_toml()])
        parse_resolved(text, str(self.path / CONFIG_FILE))
        write_atomically(self.path / CONFIG_FILE, seal_again(text.encode()))
        self.settings = read_settings(self.path)
        if (self.path / DATA_FILE).exists():
            facts = read_run_facts(self.path)
            self.run = facts.run
            self.save_data_facts(facts.data)

    def write_plan(self, config: ResolvedConfig) -> None:
        """Write which tier each client has by its device, if that was found when the run was put together."""
        if self.config.federation.plan != config.federation.plan:
            self.write_config(config)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def restore(
        self, run: str, state_type: type[Any], tiers: Collection[str]
    ) -> tuple[Checkpoint | None, list[Record]]:
        """Return the last checkpoint and the records up to it. Records without a finished checkpoint are removed."""
        try:
            checkpoint = newest_checkpoint(self.path / "checkpoints", run, state_type)
        except ForeignCheckpointError as error:
            raise FedhmError(f"{error}{self.settings.version_remark}") from None
        self.run = run
        done, file = checkpoint.round if checkpoint else 0, self.path / RECORDS_FILE
        lines = read_lines(file, run)
        records = [line.record for line in lines]
        check_records(file, records, self.config.objective.headline.name, tiers)
        if not done and (found := self._results(records)):
            raise FedhmError(
                f"{found}, but there is no checkpoint in {self.path}/checkpoints: put one back to resume the run, or "
                "start it again in another folder"
            )
        if self.config.privacy.active:
            check_no_round_repeats(self.path, done)
        if [record.round for record in records[:done]] != list(range(1, done + 1)):
            raise FedhmError(f"{file} does not hold the {done} rounds that the checkpoint has seen")
        if checkpoint and lines[done - 1].chain != checkpoint.record:
            raise FedhmError(f"{file} holds other records than the checkpoint of round {done} has seen")
        if len(records) > done + 1:  # a killed round leaves one record more; with several, checkpoints were removed
            self._check_repeatable()
            _move_rounds_aside(self.path, done, lines)
        elif file.exists():
            write_lines(file, lines[:done])  # without the line of a killed round, and without an unfinished one
        if not self._new:
            _note_resumed(self.path, self.settings.versions, done)
        return checkpoint, records[:done]

    def _results(self, records: Sequence[Record]) -> str:
        """Return the start of a sentence about results that a run killed in its first round cannot have; or nothing."""
        if len(records) > 1:  # a run killed in its first round may leave one record
            return f"{self.path}/records.jsonl names {len(records)} rounds"
        # best models of the first round are written before its record
        models = any(best_round_of(path) != 1 for path in self.models.glob("*"))
        report = (self.path / "report.md").exists()
        return f"{self.path} holds the {'models' if models else 'report'} of a run" if models or report else ""

    def rewind(self, last: int, run: str | None = None) -> None:
        """Go back to the end of round `last`: the results of later rounds are moved aside.

        run  the fingerprint of the run that will resume there, if known: a foreign checkpoint is refused in time
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
            raise FedhmError(f"{error}{self.settings.version_remark}") from None
        _move_rounds_aside(self.path, last, read_lines(self.path / RECORDS_FILE, run))

    def _check_repeatable(self) -> None:
        if self.config.privacy.active:  # two results of the same round would reveal more than ε says
            raise FedhmError(
                f"{self.path} holds a private run, which cannot be rewound: its ε counts each round once; start "
                "another run"
            )

    def secret(self, *, resumed: bool) -> bytes:
        """Return the secret that seeds a private run's noise; only a run that is not `resumed` makes a new one."""
        return read_secret(self.path, resumed)

    def commit(self, record: Record, checkpoint: Checkpoint, run: str, keep: int | Literal["all"]) -> None:
        """Write a round's record, then its checkpoint. The round counts once its checkpoint is written."""
        chain = append_record(self.path / RECORDS_FILE, record, run)
        save_checkpoint(self.path / "checkpoints", checkpoint, run, keep, chain)
        if self.config.privacy.active:
            write_round_count(self.path, checkpoint.round)

    def remove_if_no_round_done(self) -> None:
        """Remove a new run that failed in its first round: there is nothing to resume, and the folder is free again."""
        if self._new and not list(self.path.glob("checkpoints/*.safetensors")):
            for name in (
                CONFIG_FILE,
                RECORDS_FILE,
                COSTS_FILE,
                PLANS_FILE,
                DATA_FILE,
                SECRET_FILE,
                ROUNDS_FILE,
                IDENTITIES_FILE,
                TRACKING,
            ):
                (self.path / name).unlink(missing_ok=True)
            if [entry.name for entry in self.path.iterdir()] == [LOCK]:
                with suppress(OSError):  # Windows does not remove open files; a folder with only the lock is free
                    (self.path / LOCK).unlink()
                    self.path.rmdir()

    def save_costs(self, costs: dict[str, Cost]) -> None:
        self._save(COSTS_FILE, tiers={tier: vars(cost) for tier, cost in costs.items()})

    def save_plans(self, plans: Mapping[str, Mapping[str, int]]) -> None:
        """Write the current ranks of tiers that are budgets; records have the ranks of earlier rounds."""
        self._save(PLANS_FILE, plans={tier: dict(plan) for tier, plan in plans.items()})

    def save_data_facts(self, facts: DataFacts) -> None:
        metrics = [asdict(metric) for metric in self.config.objective.reported]
        self._save(DATA_FILE, settings=self.settings.digest, data=vars(facts), metrics=metrics)

    def _save(self, name: str, **content: Any) -> None:
        write_sealed_json(self.path / name, {"run": self.run, **content})

    def save_models(self, networks: dict[str, nn.Module]) -> None:
        for tier, network in networks.items():
            save_tier(tier_file(self.models, tier), network, tier, self.run)


def how_to_resume(path: Path) -> str:
    """Return the end of a sentence about a stopped run: the command that resumes it."""
    return f"; {quoted_command('fedhm', 'resume', path)} resumes from the last complete round"


def rounds_done(path: Path) -> int:
    """Return the number of records, also while another process writes them."""
    try:
        return read_regular(path / RECORDS_FILE).count(b"\n")
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise FedhmError(f"cannot read {path / RECORDS_FILE}: {os_error_reason(error)}") from None


def is_complete(path: Path, config: Config) -> bool:
    """Tell whether all rounds are done, and every tier's model and the report are on disk."""
    done = rounds_done(path) >= config.train.rounds or (config.stop.active and _stopped(path))
    if not done or not (path / "report.md").exists():
        return False
    return all(tier_file(path / "models", tier).exists() for tier in read_costs(path))


def _stopped(path: Path) -> bool:
    records = read_records(path / RECORDS_FILE) if (path / RECORDS_FILE).exists() else []
    return bool(records) and bool(records[-1].stopped)


def read_config(path: Path) -> ResolvedConfig:
    return read_settings(path).config


def read_costs(path: Path, run: str | None = None) -> dict[str, Cost]:
    """Read the cost of every tier, which a run writes at its start; with `run`, refuse those of another run."""
    found = _read_facts(path / COSTS_FILE, CostsFile)
    if not found.tiers:
        raise FedhmError(f"{path / COSTS_FILE} names no tier")
    if run is not None and found.run != run:
        raise FedhmError(f"{path / COSTS_FILE} belongs to another run than {path / DATA_FILE}")
    return found.tiers


def read_data_facts(path: Path) -> DataFacts:
    """Read the facts of a run's data, which it writes at its start."""
    return read_run_facts(path).data


def read_run_facts(path: Path) -> RunFacts:
    """Read which run a folder holds."""
    return _read_facts(path / DATA_FILE, RunFacts)


def _read_facts(file: Path, kind: type[Facts]) -> Facts:
    try:
        return TypeAdapter(kind).validate_python(read_sealed_json(file))
    except (OSError, ValueError, RecursionError) as error:
        raise FedhmError(f"cannot read {file}: {error_summary(error)}") from None
