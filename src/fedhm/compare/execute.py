"""The runs of a comparison, and running those that are missing.

A cell is one run: an entry with a seed, its config and its folder. Cells run as processes, several at a time.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedhm.assembly import assemble, read_federation
from fedhm.compare.select import Entry
from fedhm.config.loading import parse
from fedhm.config.method import Settings
from fedhm.config.schema import Config, EngineConfig, ResolvedConfig
from fedhm.engines.engine import find_devices
from fedhm.errors import FedhmError
from fedhm.machine.device import CPU
from fedhm.machine.files import file_name
from fedhm.machine.printable import printable, printable_lines
from fedhm.machine.process import usable_cores, utf8_output
from fedhm.models.build import build_model
from fedhm.models.own import build_own, load_function
from fedhm.runs.folder import RunFolder, is_complete, read_config, rounds_done

# a run with other values of these is the same run: they say where and how it runs, or follow from other settings
IGNORED_SETTINGS = ("engine.", "checkpoints.", "data.folder", "federation.plan", "federation.checkpointed")


@dataclass(frozen=True)
class Cell:
    entry: Entry
    config: ResolvedConfig
    folder: Path
    name: str  # of its folder, relative to the comparison's

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


def all_cells(config: Config, entries: Sequence[Entry], seeds: int, out: Path, jobs: int) -> list[Cell]:
    """Return all runs, seed by seed, so that an interrupted comparison has some seeds of every entry."""
    every = [(entry, seed) for seed in range(config.seed, config.seed + seeds) for entry in entries]
    return plan_cells(config, [(e, seed, f"{file_name(e.label)}-seed{seed}") for e, seed in every], out, jobs)


def plan_cells(
    config: Config, wanted: Sequence[tuple[Entry, int, str]], out: Path, jobs: int, others: int = 0, first: int = 0
) -> list[Cell]:
    """Return a cell for each entry, seed and name, with its share of this machine.

    others  the number of cells with another config that are run together with these
    first   the number of the first cell among all of them
    """
    table = config.model_dump(mode="json", exclude={"compare"})
    table["engine"] |= _share(config.engine, max(1, min(jobs, len(wanted) + others)))
    devices, cells = accelerators(config.engine), []
    for number, (entry, seed, name) in enumerate(wanted, start=first):
        own = table
        if devices:  # one for each run, in turn: runs side by side need no device in common
            place = {"device": devices[number % len(devices)], "devices": []}
            own = {**table, "engine": {**table["engine"], **place}}
        cells.append(Cell(entry, config_of(own, entry, seed).resolved(), out / name, name))
    return cells


def default_jobs(config: Config) -> int:
    """Return how many runs go on at a time: one for each accelerator, or one for each core."""
    return len(accelerators(config.engine)) or usable_cores()


def accelerators(engine: EngineConfig) -> list[str]:
    """Return the accelerators that runs are spread over: those that are named, or all of the kind; empty: the CPU."""
    if engine.name != "local":
        return []
    first, *others = find_devices(engine)
    if first == CPU or others or first.index is not None:
        return [] if first == CPU else [str(device) for device in (first, *others)]
    return [f"{first.type}:{index}" for index in range(torch.get_device_module(first).device_count())]


def _share(engine: EngineConfig, runs: int) -> dict[str, Any]:
    """Return the threads and workers for one of several runs at a time."""
    cores, threads = max(1, usable_cores() // runs), engine.threads or 1
    # on an accelerator, the run itself sees how many workers have room there
    own = "auto" if accelerators(engine) else max(1, cores // threads)
    workers = own if engine.workers == "auto" else engine.workers
    return {"threads": threads, "workers": workers, "server_threads": engine.server_threads or cores}


def config_of(table: dict[str, Any], entry: Entry, seed: int) -> Config:
    """Return the settings of an entry's run. `table` has the settings that all entries share."""
    own = {**table, "method": entry.method, "seed": seed}
    for change in entry.declared:
        own[change.section] = {**(own.get(change.section) or {}), change.key: change.value}
    for key, value in entry.changes.items():
        section, dot, name = key.partition(".")
        own[section] = {**own.get(section, {}), name: value} if dot else value
    where = f"--tune {settings_text(entry.changes)}" if entry.changes else f"--methods {entry.label}"
    return parse(own, where)


def settings_text(changes: Settings) -> str:
    """Return settings as text: train.lr=0.05,train.momentum=0."""
    return ",".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in changes.items())


def check(planned: Sequence[Cell]) -> None:
    """Find errors in folders, data and methods before anything runs."""
    for cell in planned:
        check_folder(cell)
    check_buildable(planned)


def check_buildable(planned: Sequence[Cell]) -> None:
    """Find errors in the data and the methods of the missing runs."""
    missing = [cell for cell in planned if not cell.complete]
    checked: set[str] = set()
    for seed, data in dict.fromkeys((cell.config.seed, cell.config.data) for cell in missing):
        sharing = [cell for cell in missing if (cell.config.seed, cell.config.data) == (seed, data)]
        federation = read_federation(sharing[0].config)
        for cell in sharing:
            parts = f"{cell.entry.label} {cell.config.method!r} {cell.config.server!r}"
            if parts in checked:
                continue  # the networks do not depend on the seed
            checked.add(parts)
            try:
                own = cell.entry.model
                model = (
                    build_own(load_function(own), cell.config.seed)
                    if own
                    else build_model(cell.config, federation.input_shape, federation.classes)
                )
                assemble(model, federation, cell.config)
            except FedhmError as error:
                tuned = f" --tune {settings_text(cell.entry.changes)}" if cell.entry.changes else ""
                raise FedhmError(f"--methods {cell.entry.label}{tuned}: {error}") from error


def check_folder(cell: Cell) -> None:
    """Refuse a folder that holds something else, or a run with other settings."""
    if not (cell.folder / "config.toml").exists():
        RunFolder.check_free(cell.folder)
    elif cell.rounds_done and (changed := changed_setting(cell)):
        raise FedhmError(f"{cell.folder} was run with {changed}: choose another --out, or remove it")


def changed_setting(cell: Cell) -> str:
    """Return the first setting that differs from the run in the cell's folder, as part of a sentence."""
    old, new = read_config(cell.folder).dotted(), cell.config.dotted()
    for key in [*new, *old]:
        if old.get(key) != new.get(key) and not key.startswith(IGNORED_SETTINGS):
            return f"{key} = {old.get(key, 'nothing')}, now {new.get(key, 'nothing')}"
    return ""


# Running the missing cells.

POLL = 0.2  # seconds between two looks at the runs
UNUSABLE = ("cannot be used: ", "could be used in round ")  # parts of the sentence in which a run refuses its updates
PATIENCE = 10.0  # seconds that a run is given to stop by itself


class Failed(NamedTuple):
    """A run that failed, and the reason."""

    cell: Cell
    reason: str

    @property
    def sentence(self) -> str:
        return f"{self.cell.name} failed: {self.reason}"

    @property
    def diverged(self) -> bool:
        """Tell whether the server refused the trained weights, so that the run would fail again."""
        return any(said in self.reason for said in UNUSABLE) and "nobody answered" not in self.reason


class _Child:
    """A process that runs `fedhm resume` on one cell. Of its output, only stderr is kept."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        cell.open()
        own = ["--model", cell.entry.model] if cell.entry.model else []
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        # A session of its own: Ctrl-C reaches it from here, once, and not from the terminal as well.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedhm", "resume", str(cell.folder), *own],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            env=utf8_output(),
            start_new_session=True,
        )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def failure(self) -> Failed | None:
        """Return why the run failed, once it has ended."""
        code = self._process.returncode
        if code == 0:
            return None
        self._stderr.seek(0)
        return Failed(self.cell, _reason(self._stderr.read().decode(errors="replace").strip(), code))

    def interrupt(self) -> None:
        if self.running:
            self._process.send_signal(signal.SIGINT)

    def end(self, deadline: float) -> None:
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()


def _reason(said: str, code: int) -> str:
    """Return the reason of a failure: the run's own sentence, or the last line of a traceback."""
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    if "fedhm: " in said:
        return printable_lines(said.rpartition("fedhm: ")[2])
    return printable(said.splitlines()[-1]) if said else f"it ended with exit code {code}"


def execute(cells: Sequence[Cell], jobs: int, console: Console) -> list[Failed]:
    """Run all cells that are not complete, and return those that failed. No process is left behind in any case."""
    waiting = [cell for cell in cells if not cell.complete]
    children: list[_Child] = []
    failures: list[Failed] = []
    with _requests_to_stop() as stops, _progress(console, cells) as shown:
        try:
            while (waiting or children) and not stops:
                while waiting and len(children) < jobs:
                    cell = waiting.pop(0)
                    try:
                        children.append(_Child(cell))
                    except FedhmError as error:  # another process works in its folder
                        failures.append(Failed(cell, str(error)))
                shown.update([child.cell for child in children])
                time.sleep(POLL)
                for child in [child for child in children if not child.running]:
                    children.remove(child)
                    failure = child.failure
                    child.end(time.monotonic())
                    failures += [failure] if failure else []
                    shown.ended(child.cell, failure.sentence if failure else None)
        finally:
            for child in children:
                child.interrupt()
            deadline = time.monotonic() + PATIENCE
            for child in children:
                child.end(deadline)
    if stops:
        raise KeyboardInterrupt
    return failures


@contextmanager
def _requests_to_stop() -> Iterator[list[int]]:
    """Note Ctrl-C, SIGTERM and the end of the terminal without raising, so that a run that just started is not lost."""
    stops: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        stops.append(number)

    signals = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in signals}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _LiveBar:
    """A bar of the rounds of all runs, with the current runs beside it."""

    def __init__(self, console: Console, cells: Sequence[Cell]) -> None:
        self._console = console
        self._done = {cell.name: cell.rounds_done for cell in cells}
        self._progress = Progress(
            TextColumn("[bold]rounds"),
            MofNCompleteColumn(),
            BarColumn(bar_width=14),
            TimeRemainingColumn(),
            TextColumn("left  {task.fields[doing]}", markup=False),
            console=console,
            speed_estimate_period=600,  # a round may take minutes
        )
        total = sum(cell.config.train.rounds for cell in cells)
        self._bar = self._progress.add_task("", total=total, completed=sum(self._done.values()), doing="")

    def __enter__(self) -> "_LiveBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.update(self._bar, doing="")
        self._progress.stop()

    def update(self, running: Sequence[Cell]) -> None:
        self._done |= {cell.name: cell.rounds_done for cell in running}
        doing = ", ".join(f"{cell.name} {self._done[cell.name]}" for cell in running)
        self._progress.update(self._bar, completed=sum(self._done.values()), doing=doing)

    def ended(self, cell: Cell, failure: str | None) -> None:
        self.update([cell])
        if failure:
            self._console.print(failure, style="red", highlight=False, markup=False)


class _LogLines:
    """A line for each run that begins or ends, for logs."""

    def __init__(self, console: Console, cells: Sequence[Cell]) -> None:
        self._console, self._of, self._cells = console, len(cells), cells
        self._done = sum(cell.complete for cell in cells)
        self._rounds, self._began = sum(cell.rounds_done for cell in cells), time.monotonic()
        self._begun: dict[str, float] = {}

    def __enter__(self) -> "_LogLines":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def update(self, running: Sequence[Cell]) -> None:
        for cell in running:
            if cell.name not in self._begun:
                self._begun[cell.name] = time.monotonic()
                where = f" after round {cell.rounds_done}" if cell.rounds_done else ""
                self._say(f"{cell.name} runs{where}")

    def ended(self, cell: Cell, failure: str | None) -> None:
        self._done += failure is None
        seconds = time.monotonic() - self._begun[cell.name]
        self._say(failure or f"{cell.name} done in {seconds:.0f} s, {self._done} of {self._of} runs{self._left()}")

    def _left(self) -> str:
        """Return how long the other runs take if their rounds take as long as those so far."""
        left = sum(cell.config.train.rounds - cell.rounds_done for cell in self._cells if not cell.complete)
        done = sum(cell.rounds_done for cell in self._cells) - self._rounds
        if not left or not done:
            return ""
        seconds = round((time.monotonic() - self._began) * left / done)
        return f", about {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


def _progress(console: Console, cells: Sequence[Cell]) -> _LiveBar | _LogLines:
    return _LiveBar(console, cells) if console.is_terminal else _LogLines(console, cells)
