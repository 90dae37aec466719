"""A run's folder: resolved config, records, checkpoints, final models. Written by one process at a time."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fedhm.config.reading import parse_resolved
from fedhm.config.settings import Config, ResolvedConfig
from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.machine.locks import take_lock
from fedhm.machine.printable import pasteable
from fedhm.measure.cost import Cost
from fedhm.runs.checkpoint import Checkpoint, newest_checkpoint, save_checkpoint
from fedhm.runs.fingerprint import DataFacts
from fedhm.runs.records import append_record, read_records
from fedhm.runs.tier_files import save_tier
from fedhm.server.record import Record

LOCK = ".lock"  # stays in the folder, and means nothing unless a process holds it


class RunFolder:
    def __init__(self, path: Path, config: ResolvedConfig) -> None:
        self.path = path
        self.config = config
        self._new = False  # made by this process
        lock = take_lock(path / LOCK)
        if lock is None:
            raise FedhmError(f"another process is running in {path}")
        self._lock = lock

    @staticmethod
    def check_free(path: Path) -> None:
        if (path / "config.toml").exists():
            command = pasteable("fedhm", "resume", path)
            raise FedhmError(f"{path} holds a run already: resume it with {command}, or choose another folder")
        if path.is_dir() and any(entry.name != LOCK and not entry.name.endswith(".tmp") for entry in path.iterdir()):
            raise FedhmError(f"{path} holds other files: choose an empty or a new folder")

    @classmethod
    def create(cls, path: Path, config: ResolvedConfig) -> "RunFolder":
        cls.check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FedhmError(f"cannot make the folder {path}: {error.strerror}") from None
        folder = cls(path, config)
        try:
            write_atomically(path / "config.toml", folder.config.to_toml())
        except BaseException:
            folder.__exit__()
            raise
        folder._new = True
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        return cls(path, read_config(path))

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def restore(self, run: str, state_type: type[Any]) -> tuple[Checkpoint | None, list[Record]]:
        """Return the last checkpoint and the records up to it. Remove those of rounds without a finished checkpoint."""
        checkpoint = newest_checkpoint(self.path / "checkpoints", run, state_type)
        done = checkpoint.round if checkpoint else 0
        records = read_records(self.path / "records.jsonl")[:done]
        if [record.round for record in records] != list(range(1, done + 1)):
            raise FedhmError(f"{self.path}/records.jsonl does not hold the {done} rounds that the checkpoint has seen")
        write_atomically(self.path / "records.jsonl", "".join(record.to_json() + "\n" for record in records))
        return checkpoint, records

    def commit(self, record: Record, checkpoint: Checkpoint, run: str) -> None:
        """Write a round's record and checkpoint. The checkpoint comes last: it is what makes the round count."""
        append_record(self.path / "records.jsonl", record)
        save_checkpoint(self.path / "checkpoints", checkpoint, run)

    def remove_if_nothing_was_done(self) -> None:
        """Remove a run that failed in its first round: it leaves nothing to resume, and would stand in the way."""
        if self._new and not list(self.path.glob("checkpoints/*.safetensors")):
            for name in ("config.toml", "records.jsonl", "tiers.json", "data.json"):
                (self.path / name).unlink(missing_ok=True)
            if [entry.name for entry in self.path.iterdir()] == [LOCK]:
                with suppress(OSError):  # Windows removes no open file, and a folder that holds the lock alone is free
                    (self.path / LOCK).unlink()
                    self.path.rmdir()

    def save_costs(self, costs: dict[str, Cost]) -> None:
        write_atomically(self.path / "tiers.json", json.dumps({t: vars(cost) for t, cost in costs.items()}, indent=2))

    def save_data_facts(self, facts: DataFacts) -> None:
        write_atomically(self.path / "data.json", json.dumps(vars(facts), indent=2))

    def save_models(self, networks: dict[str, nn.Module]) -> None:
        for tier, network in networks.items():
            save_tier(_model_file(self.path, tier), network, tier)


def _model_file(path: Path, tier: str) -> Path:
    return path / "models" / f"{tier.replace('/', '-')}.safetensors"


def how_to_resume(path: Path) -> str:
    """Return the end of a sentence that says why a run stopped."""
    return f"; {pasteable('fedhm', 'resume', path)} resumes from the last complete round"


def rounds_done(path: Path) -> int:
    """Count the records that a run has written, also while another process writes them."""
    file = path / "records.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def is_complete(path: Path, config: Config) -> bool:
    """Say whether all rounds are done, and every tier's model and the report are on disk."""
    if rounds_done(path) < config.train.rounds or not (path / "report.md").exists():
        return False
    return all(_model_file(path, tier).exists() for tier in read_costs(path))


def read_config(path: Path) -> ResolvedConfig:
    file = path / "config.toml"
    if not file.exists():
        raise FedhmError(f"{path} is not the folder of a run: there is no config.toml in it")
    try:
        return parse_resolved(file.read_text(), str(file))
    except UnicodeDecodeError as error:
        raise FedhmError(f"{file} is damaged: {error}") from None


def read_costs(path: Path) -> dict[str, Cost]:
    """Read the cost of every tier, as a run wrote them at its start."""
    try:
        return {tier: Cost(**cost) for tier, cost in json.loads((path / "tiers.json").read_text()).items()}
    except (OSError, ValueError, TypeError) as error:
        raise FedhmError(f"cannot read {path}/tiers.json: {error}") from None


def read_data_facts(path: Path) -> DataFacts | None:
    """Read the facts of a run's data; None for a run from before they were written."""
    file = path / "data.json"
    if not file.exists():
        return None
    try:
        facts = DataFacts(**json.loads(file.read_text()))
        return replace(facts, input_shape=tuple(facts.input_shape))
    except (OSError, ValueError, TypeError) as error:
        raise FedhmError(f"cannot read {file}: {error}") from None
