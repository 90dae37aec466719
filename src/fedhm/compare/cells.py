"""The cells of a comparison: every entry with every seed is one run, with its config and its folder."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhm.assembly import assemble, read_federation
from fedhm.compare.select import Entry
from fedhm.config.loading import parse
from fedhm.config.method import Settings
from fedhm.config.schema import Config, EngineConfig, ResolvedConfig
from fedhm.errors import FedhmError
from fedhm.machine.files import file_name
from fedhm.machine.process import usable_cores
from fedhm.models.build import build_model
from fedhm.runs.folder import RunFolder, is_complete, read_config, rounds_done

# How and where a run went does not make it another, nor does what follows from the other settings
OF_NO_CONCERN = ("engine.", "checkpoints.", "data.folder", "federation.plan", "federation.checkpointed")


@dataclass(frozen=True)
class Cell:
    entry: Entry
    config: ResolvedConfig
    folder: Path
    name: str  # its folder, as seen from the comparison's

    @property
    def rounds_done(self) -> int:
        return rounds_done(self.folder)

    @property
    def complete(self) -> bool:
        return is_complete(self.folder, self.config)

    def open(self) -> None:
        """Make the run's folder, so that it can be resumed like any interrupted run."""
        if not (self.folder / "config.toml").exists():
            with RunFolder.create(self.folder, self.config):
                return
        with RunFolder.open(self.folder) as folder:
            if not self.rounds_done and folder.config != self.config:
                folder.write_config(self.config)


def cells(config: Config, entries: Sequence[Entry], seeds: int, out: Path, jobs: int) -> list[Cell]:
    """Return all runs, seed by seed, so that an interrupted comparison has some seeds of every entry."""
    every = [(entry, seed) for seed in range(config.seed, config.seed + seeds) for entry in entries]
    return plan(config, [(e, seed, f"{file_name(e.label)}-seed{seed}") for e, seed in every], out, jobs)


def plan(config: Config, wanted: Sequence[tuple[Entry, int, str]], out: Path, jobs: int) -> list[Cell]:
    """Return a run for each entry, seed and name, with its share of this machine."""
    table = config.model_dump(mode="json", exclude={"compare"})
    table["engine"] |= _share(config.engine, max(1, min(jobs, len(wanted))))
    return [Cell(entry, config_of(table, entry, seed).resolved(), out / name, name) for entry, seed, name in wanted]


def _share(engine: EngineConfig, runs: int) -> dict[str, int]:
    """Return what one of several runs side by side may use of this machine."""
    cores, threads = max(1, usable_cores() // runs), engine.threads or 1
    workers = max(1, cores // threads) if engine.workers == "auto" else engine.workers
    return {"threads": threads, "workers": workers, "server_threads": engine.server_threads or cores}


def config_of(table: dict[str, Any], entry: Entry, seed: int) -> Config:
    """Return the settings of an entry's run; `table` holds what all entries share."""
    own = {**table, "method": entry.method, "seed": seed}
    for key, value in entry.changes.items():
        section, dot, name = key.partition(".")
        own[section] = {**own.get(section, {}), name: value} if dot else value
    where = f"--tune {point_name(entry.changes)}" if entry.changes else f"--methods {entry.label}"
    return parse(own, where)


def point_name(changes: Settings) -> str:
    """Return how an entry's own changes are called: train.lr=0.05,train.momentum=0."""
    return ",".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in changes.items())


def check(planned: Sequence[Cell]) -> None:
    """Find what is wrong with folders, data and methods before anything runs."""
    for cell in planned:
        check_folder(cell)
    check_parts(planned)


def check_parts(planned: Sequence[Cell]) -> None:
    """Find what is wrong with the data and the methods of the runs that are still to do."""
    missing = [cell for cell in planned if not cell.complete]
    checked: set[str] = set()
    for seed in sorted({cell.config.seed for cell in missing}):
        of_seed = [cell for cell in missing if cell.config.seed == seed]
        federation = read_federation(of_seed[0].config)
        for cell in of_seed:
            parts = f"{cell.entry.label} {cell.config.method!r} {cell.config.server!r}"
            if parts in checked:
                continue  # another seed makes no other network
            checked.add(parts)
            try:
                model = build_model(cell.config, federation.input_shape, federation.classes)
                assemble(model, federation, cell.config)
            except FedhmError as error:
                tuned = f" --tune {point_name(cell.entry.changes)}" if cell.entry.changes else ""
                raise FedhmError(f"--methods {cell.entry.label}{tuned}: {error}") from error


def check_folder(cell: Cell) -> None:
    """Refuse a folder that holds something else, or a run with other settings."""
    if not (cell.folder / "config.toml").exists():
        RunFolder.check_free(cell.folder)
    elif cell.rounds_done and (changed := changed_setting(cell)):
        raise FedhmError(f"{cell.folder} was run with {changed}: choose another --out, or remove it")


def changed_setting(cell: Cell) -> str:
    """Return the first setting in which a run differs from the one in its folder, as part of a sentence."""
    old, new = read_config(cell.folder).dotted(), cell.config.dotted()
    for key in [*new, *old]:
        if old.get(key) != new.get(key) and not key.startswith(OF_NO_CONCERN):
            return f"{key} = {old.get(key, 'nothing')}, now {new.get(key, 'nothing')}"
    return ""
