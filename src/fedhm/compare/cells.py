"""The cells of a comparison: every entry with every seed is one run, with its config and its folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhm.assembly import assemble, build_model, read_federation
from fedhm.compare.entries import Entry
from fedhm.config.reading import parse
from fedhm.config.settings import Config, EngineConfig, ResolvedConfig
from fedhm.errors import FedhmError
from fedhm.machine.cores import usable_cores
from fedhm.machine.files import write_atomically
from fedhm.runs.folder import RunFolder, is_complete, read_config, rounds_done

OF_NO_CONCERN = ("engine.", "data.folder")  # how and where a run went does not make it another


@dataclass(frozen=True)
class Cell:
    entry: Entry
    config: ResolvedConfig
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

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
                write_atomically(self.folder / "config.toml", self.config.to_toml())


def cells(config: Config, entries: Sequence[Entry], seeds: int, out: Path, jobs: int) -> list[Cell]:
    """Return all runs, seed by seed, so that an interrupted comparison has some seeds of every entry."""
    table = config.model_dump(mode="json", exclude={"compare"})
    table["engine"] |= _share(config.engine, min(jobs, seeds * len(entries)))
    return [
        Cell(entry, _config(table, entry, seed), out / _folder_name(entry, seed))
        for seed in range(config.seed, config.seed + seeds)
        for entry in entries
    ]


def _share(engine: EngineConfig, runs: int) -> dict[str, int]:
    """Return what one of several runs side by side may use of this machine."""
    cores, threads = max(1, usable_cores() // runs), engine.threads or 1
    workers = max(1, cores // threads) if engine.workers == "auto" else engine.workers
    return {"threads": threads, "workers": workers, "server_threads": engine.server_threads or cores}


def _config(table: dict[str, Any], entry: Entry, seed: int) -> ResolvedConfig:
    return parse({**table, "method": entry.method, "seed": seed}, f"--methods {entry.label}").resolved()


def _folder_name(entry: Entry, seed: int) -> str:
    return f"{entry.label.replace('/', '-').replace(':', '-')}-seed{seed}"


def check(planned: Sequence[Cell]) -> None:
    """Find what is wrong with folders, data and methods before anything runs."""
    for cell in planned:
        _check_folder(cell)
    missing = [cell for cell in planned if not cell.complete]
    checked: set[str] = set()
    for seed in sorted({cell.config.seed for cell in missing}):
        of_seed = [cell for cell in missing if cell.config.seed == seed]
        federation = read_federation(of_seed[0].config)
        for cell in of_seed:
            if cell.entry.label in checked:
                continue  # another seed makes no other network
            checked.add(cell.entry.label)
            try:
                model = build_model(cell.config, federation.input_shape, federation.classes)
                assemble(model, federation, cell.config)
            except FedhmError as error:
                raise FedhmError(f"--methods {cell.entry.label}: {error}") from error


def _check_folder(cell: Cell) -> None:
    if not (cell.folder / "config.toml").exists():
        RunFolder.check_free(cell.folder)
    elif cell.rounds_done:
        old, new = read_config(cell.folder).dotted(), cell.config.dotted()
        for key in [*new, *old]:
            if old.get(key) != new.get(key) and not key.startswith(OF_NO_CONCERN):
                raise FedhmError(
                    f"{cell.folder} was run with {key} = {old.get(key, 'nothing')}, now {new.get(key, 'nothing')}: "
                    "choose another --out, or remove it"
                )
