"""Whether the files of a run's folder are as the run wrote them, and belong together.

Settings, facts, models and checkpoints carry seals, records form a chain, and a report has a list of checksums. These
files name the run that wrote them, and a checkpoint names the record of its round.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from fedhm.errors import FedhmError
from fedhm.machine.files import os_error_reason, read_regular
from fedhm.machine.seal import check_checksum, read_checksums, read_sealed_json
from fedhm.runs.folder import (
    CONFIG_FILE,
    COSTS_FILE,
    DATA_FILE,
    LOCK,
    PLANS_FILE,
    RECORDS_FILE,
    TRACKING,
    RunFacts,
    RunSettings,
    read_costs,
    read_run_facts,
    read_settings,
)
from fedhm.runs.identities import IDENTITIES_FILE, Identities
from fedhm.runs.models import best_round_of, read_tier, tier_file
from fedhm.runs.privacy import ROUNDS_FILE, SECRET_FILE, read_round_count, read_secret
from fedhm.runs.rounds import (
    RecordLine,
    check_checkpoint,
    check_records,
    checkpoint_file,
    existing_checkpoints,
    read_lines,
    round_of,
)

State = Literal["intact", "damaged", "missing", "unreadable", "not checked"]
CHECKSUMS_FILE = "report.json"  # `report` writes it


@dataclass(frozen=True)
class FileState:
    name: str  # relative to the run's folder
    state: State
    note: str = ""

    @property
    def bad(self) -> bool:
        return self.state in ("damaged", "missing", "unreadable")


@dataclass
class Verification:
    """Checks the files of one folder, in the order in which they depend on each other."""

    path: Path
    found: list[FileState] = field(default_factory=list)
    _settings: RunSettings | None = None
    _facts: RunFacts | None = None
    _lines: list[RecordLine] = field(default_factory=list)
    _tiers: tuple[str, ...] = ()
    _checkpoints: list[Path] = field(default_factory=list)

    def verify(self) -> list[FileState]:
        """Return the state of every file."""
        self._checkpoints = existing_checkpoints(self.path / "checkpoints")  # first: the run may go on meanwhile
        self._check(CONFIG_FILE, self._check_settings)
        self._check(DATA_FILE, self._check_facts)
        self._check(COSTS_FILE, self._check_costs)
        self._check(PLANS_FILE, self._check_plans, optional=True)
        self._check(RECORDS_FILE, self._check_records, optional=not self._checkpoints and not self._reported)
        for checkpoint in self._checkpoints:
            self._check(self._name(checkpoint), self._check_checkpoint)
        self._find_missing_checkpoints()
        self._check_models()
        private = self._settings is not None and self._settings.config.privacy.active
        self._check(SECRET_FILE, self._check_secret, optional=not private)
        self._check(ROUNDS_FILE, self._check_round_count, optional=not (private and self._checkpoints))
        self._check(TRACKING, self._check_tracking, optional=True)
        self._check(IDENTITIES_FILE, self._check_identities, optional=True)
        self._check_report()
        for aside in sorted(self.path.glob("taken-back-*")):
            self._check_moved_aside(aside)
        self._name_others()
        return self.found

    def _check(self, name: str, check: Callable[[Path], str], optional: bool = False) -> None:
        """Note the state of a file; `check` returns a note, or raises if the file is damaged."""
        file = self.path / name
        if optional and not _exists(file):
            return
        try:
            self.found.append(FileState(name, "intact", check(file)))
        except FileNotFoundError:
            self.found.append(FileState(name, "missing"))
        except OSError as error:
            self.found.append(FileState(name, "unreadable", os_error_reason(error)))
        except (FedhmError, ValueError) as error:
            self.found.append(FileState(name, "damaged" if _exists(file) else "missing", str(error)))

    @property
    def _run(self) -> str | None:
        return self._facts.run if self._facts else None

    def _check_settings(self, _: Path) -> str:
        self._settings = read_settings(self.path)
        return f"written by fedhm {', '.join(self._settings.versions)}"

    def _check_facts(self, _: Path) -> str:
        facts = read_run_facts(self.path)
        if self._settings and self._settings.digest != facts.settings:
            raise ValueError(f"it belongs to another run than {CONFIG_FILE}")
        self._facts = facts
        return f"run {facts.run}"

    def _check_costs(self, _: Path) -> str:
        self._tiers = tuple(read_costs(self.path, self._run))
        return f"tiers {', '.join(self._tiers)}"

    def _check_plans(self, file: Path) -> str:
        table = read_sealed_json(file)
        if self._run is not None and table.get("run") != self._run:
            raise ValueError("it belongs to another run")
        return ""

    def _check_records(self, file: Path) -> str:
        if not _exists(file):
            raise FileNotFoundError
        lines = read_lines(file, self._run)
        if self._settings and self._tiers:
            headline = self._settings.config.objective.headline.name
            check_records(file, [line.record for line in lines], headline, self._tiers)
        self._lines = lines
        if self._finished and not read_regular(file).endswith(b"\n"):  # a killed round leaves a part of a line
            raise ValueError("something stands behind its last round")
        newest = self._checkpoints[-1:]
        if newest and round_of(newest[0]) > len(lines):
            raise ValueError(f"it lacks the last round: {newest[0].name} has seen more than its {len(lines)}")
        return f"{len(lines)} rounds"

    def _check_checkpoint(self, file: Path) -> str:
        _, header = check_checkpoint(file, self._run)
        number = header["round"]
        if number != round_of(file):
            raise ValueError(f"it is the checkpoint of round {number}")
        if len(self._lines) >= number and self._lines[number - 1].chain != header["record"]:
            raise ValueError(f"it has seen other records than those in {RECORDS_FILE}")
        return f"round {number}"

    def _find_missing_checkpoints(self) -> None:
        """Note checkpoints that should be there: all that a finished run keeps, and the newest of another run.

        A killed round leaves its record alone, and a run that was rewound may have a single checkpoint.
        """
        existing, done = {round_of(checkpoint) for checkpoint in self._checkpoints}, len(self._lines)
        if self._settings is not None and self._finished and self._reported:
            keep = self._settings.config.checkpoints.keep
            expected = range(1 if keep == "all" else max(1, done - keep + 1), done + 1)
        else:
            expected = range(done, done + 1) if max(existing, default=0) < done - 1 else range(0)
        for number in expected:
            if number not in existing:
                name = self._name(checkpoint_file(self.path / "checkpoints", number))
                self.found.append(FileState(name, "missing", f"the newest is that of round {max(existing, default=0)}"))

    def _check_secret(self, _: Path) -> str:
        read_secret(self.path, resumed=True)
        return ""

    def _check_round_count(self, _: Path) -> str:
        return f"{read_round_count(self.path)} rounds"

    def _check_tracking(self, file: Path) -> str:
        read_sealed_json(file)
        return ""

    def _check_identities(self, _: Path) -> str:
        Identities.read(self.path)
        return "its form is right; operators may edit it, so it has no seal"

    def _check_models(self) -> None:
        models = self.path / "models"
        folders = [models, *sorted((f for f in models.glob("*") if best_round_of(f)), key=best_round_of)]
        known = {tier_file(folder, tier): tier for folder in folders for tier in self._tiers}
        for folder in folders:
            present = sorted(folder.glob("*.safetensors"))
            expected = [file for file in known if file.parent == folder and (present or self._finished)]
            for file in dict.fromkeys([*expected, *present]):
                self._check(self._name(file), partial(self._check_model, known.get(file, "")))

    @property
    def _finished(self) -> bool:
        """Tell whether all rounds are done. The models are written after them; `fedhm resume` writes missing ones."""
        if self._settings is None or not self._lines:
            return False
        last = self._lines[-1].record
        return last.round >= self._settings.config.train.rounds or bool(last.stopped)

    @property
    def _reported(self) -> bool:
        return (self.path / "report.md").exists()

    def _check_model(self, tier: str, file: Path) -> str:
        _, header = read_tier(file, tier, self._run or "")
        return f"tier {header['tier']}"

    def _check_report(self) -> None:
        if not (self.path / CHECKSUMS_FILE).exists():
            if (self.path / "report.md").exists():
                again = "the report was not finished; fedhm report writes it again"
                self.found.append(FileState(CHECKSUMS_FILE, "missing", again))
            return
        checksums: dict[str, str] = {}

        def read(file: Path) -> str:
            listed = read_checksums(file)
            if self._run is not None and listed.run not in ("", self._run):
                raise ValueError("it is the report of another run")
            checksums.update(listed.sha256)
            return ""

        self._check(CHECKSUMS_FILE, read)
        for name, digest in checksums.items():
            self._check(name, partial(_check_listed, digest))

    def _check_moved_aside(self, aside: Path) -> None:
        """Check the results of rounds that were rewound: each by itself."""
        self._check(f"{aside.name}/{RECORDS_FILE}", self._check_moved_records)
        for file in existing_checkpoints(aside / "checkpoints"):
            self._check(self._name(file), lambda file: f"round {check_checkpoint(file, self._run)[1]['round']}")
        for file in sorted((aside / "models").rglob("*.safetensors")):
            self._check(self._name(file), partial(self._check_model, ""))

    def _check_moved_records(self, file: Path) -> str:
        if not _exists(file):
            raise FileNotFoundError
        return f"{len(read_lines(file))} rounds, moved aside"

    def _name_others(self) -> None:
        named = {state.name for state in self.found} | {LOCK}
        for file in self._all_files():
            if (name := self._name(file)) not in named:
                note = "left by a killed process" if name.endswith(".tmp") else "fedhm knows no such file"
                self.found.append(FileState(name, "not checked", note))

    def _name(self, file: Path) -> str:
        return file.relative_to(self.path).as_posix()

    def _all_files(self) -> Iterator[Path]:
        return (file for file in sorted(self.path.rglob("*")) if not file.is_dir())


def _exists(file: Path) -> bool:
    return file.exists() or file.is_symlink()  # a link to nothing is there, too


def _check_listed(digest: str, file: Path) -> str:
    check_checksum(file, digest)
    return ""


def verify_run(path: Path) -> list[FileState]:
    """Return the state of every file in a run's folder; refuse a folder that holds no run."""
    if not (path / CONFIG_FILE).exists() and not (path / RECORDS_FILE).exists():
        read_settings(path)  # raises, and says what is there
    return Verification(path).verify()
