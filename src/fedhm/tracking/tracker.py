"""What trackers are told of a record: names and numbers."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from warnings import warn

from pydantic import TypeAdapter
from torch import nn

from fedhm.config.schema import Config
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.machine.files import file_name, os_error_sentence, write_atomically
from fedhm.machine.printable import printable
from fedhm.runs.folder import TRACKING
from fedhm.runs.models import save_tier, tier_file
from fedhm.server.callbacks import About
from fedhm.server.record import Record

_ODD = re.compile(r"[^\w\-. /]")  # what some tracker refuses in names


def values(record: Record) -> dict[str, float]:
    """Return every number of a record that has a name: `accuracy/1-8`, `train_loss/full`, `diagnostics/kappa_uv`."""
    found: dict[str, float] = {
        "participants": len(record.participants),
        "dropped": len(record.dropped),
        "clipped": len(record.clipped),
        "attempts": record.attempts,
    }
    for tier, metrics in record.metrics.items():
        found |= {f"{name}/{_one_word(tier)}": value for name, value in metrics.items()}
    for tier, traffic in record.traffic.items():
        of_tier = {"train_loss": traffic.loss, "bytes_down": traffic.down, "bytes_up": traffic.up, "macs": traffic.macs}
        found |= {f"{name}/{_one_word(tier)}": value for name, value in of_tier.items()}
    for tier, at_clients in record.clients.items():
        for what in ("mean", "median", "worst_tenth"):
            of_clients = getattr(at_clients.overall, what)
            found |= {f"clients_{what}_{name}/{_one_word(tier)}": value for name, value in of_clients.items()}
    found |= {f"diagnostics/{_one_word(name)}": value for name, value in record.diagnostics.items()}
    found |= {f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()}
    if record.epsilon is not None:
        found["epsilon"] = record.epsilon
    if record.simulated is not None:
        found["simulated_seconds"] = record.simulated.seconds
    return {_ODD.sub("_", name): float(value) for name, value in found.items()}


def settings(config: Config) -> dict[str, Any]:
    """Return the settings by their dotted keys, without those of the tracker itself."""
    return {key: value for key, value in config.dotted().items() if not key.startswith("tracking.")}


def _one_word(name: str) -> str:
    """Return a tier's name as its files are called: a slash would make a folder of it."""
    return file_name(name)


# Which tracked run belongs to a run, and how many of its rounds that has: `tracking.json` in the run's folder.


@dataclass(frozen=True)
class Remembered:
    run: str = ""  # how the tool identifies the tracked run; empty: there is none yet
    rounds: int = 0


def recall(folder: Path | None, key: str) -> Remembered:
    """Return what is known of a tracker; nothing, if the run is not kept on disk."""
    return _read(folder / TRACKING).get(key, Remembered()) if folder else Remembered()


def remember(folder: Path | None, key: str, what: Remembered) -> None:
    if folder:
        known = _read(folder / TRACKING) | {key: what}
        write_atomically(folder / TRACKING, json.dumps({k: asdict(each) for k, each in known.items()}, indent=2))


def _read(path: Path) -> dict[str, Remembered]:
    if not path.exists():
        return {}
    try:
        return TypeAdapter(dict[str, Remembered]).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FedhmError(f"cannot read {path}: {error}; without it, trackers begin new tracked runs") from None


# What all trackers have in common: a resumed run goes on in the same tracked run, and no failure costs a round.

LONGEST = 200  # characters of what a tool says


class Tracker(ABC):
    """A watcher that tells a tool how a run goes.

    Which tracked run it is, and how many rounds that has, is remembered in the run's folder. What the tool misses is
    told later: in the next round, or when the run is resumed.
    """

    called: ClassVar[str]  # in sentences
    extra: ClassVar[str]  # of this package, which installs it
    module: ClassVar[str]  # of the tool, which must be there
    takes_back: ClassVar[bool] = False  # it can forget rounds that were taken back

    def __init__(self, place: str, *, models: bool = True) -> None:
        if find_spec(self.module) is None:
            raise FedhmError(f"{self.called} is not installed: pip install 'fedhm[{self.extra}]'")
        self._key = f"{self.extra} {place}"
        self._models = models
        self._folder: Path | None = None
        self._run = ""
        self._missing: list[Record] = []
        self._fails = self._open = self._complete = False

    @abstractmethod
    def open(self, about: About, name: str, run: str, first: int) -> str:
        """Begin a tracked run, or go on in `run` with round `first`; return what identifies it."""

    @abstractmethod
    def log(self, found: Mapping[str, float], round_number: int) -> None:
        """Tell the numbers of a round."""

    @abstractmethod
    def keep(self, files: Sequence[Path]) -> None:
        """Keep the models of the tiers as artefacts, where the tool has such."""

    @abstractmethod
    def end(self, complete: bool) -> None:
        """End what was begun, in this process at least; the tracked run may be complete."""

    def begun(self, about: About) -> None:
        self._folder, done = about.folder, len(about.records)
        known = recall(about.folder, self._key)
        if known.rounds > done and not self.takes_back:
            known = Remembered()  # some of its rounds were taken back, which it cannot forget: another tracked run
        held = min(known.rounds, done)
        name = about.folder.resolve().name if about.folder else about.config.method.name
        try:
            self._run = self.open(about, name, known.run, held + 1)
        except FedhmError:
            raise
        except Exception as error:  # whatever the tool raises
            raise FedhmError(f"{self.called} cannot be used: {_why(error)}") from error
        self._open, self._complete = True, False
        remember(self._folder, self._key, Remembered(self._run, held))
        self._missing = list(about.records[held:])
        self._tell()

    def started(self, done: int, rounds: int) -> None:  # noqa: B027
        """Do nothing: `begun` has told more."""

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None:  # noqa: B027
        """Do nothing: trackers are told of rounds."""

    def round_done(self, record: Record) -> None:
        self._missing.append(record)
        self._tell()

    def ended(self, networks: Mapping[str, nn.Module]) -> None:
        self._tell()
        try:
            if self._models and not self._fails:
                with TemporaryDirectory(prefix="fedhm-") as scratch:
                    files = {tier: tier_file(Path(scratch), tier) for tier in networks}
                    for tier, network in networks.items():
                        save_tier(files[tier], network, tier)
                    self.keep(list(files.values()))
        except Exception as error:  # whatever the tool raises: the run is done
            self._warn(error, "the models are not there")
        self._complete = not self._missing

    def close(self) -> None:
        open_run, self._open = self._open, False
        try:
            if open_run:
                self.end(self._complete)
        except Exception as error:  # whatever the tool raises: the run is over
            self._warn(error, "not all of the run may be there")

    def _tell(self) -> None:
        """Tell all rounds that it does not have yet."""
        try:
            while self._missing:
                record = self._missing[0]
                self.log(values(record), record.round)
                self._missing.pop(0)
                remember(self._folder, self._key, Remembered(self._run, record.round))
            self._fails = False
        except Exception as error:  # whatever the tool raises: no round is lost by it
            if not self._fails:
                self._warn(error, "the run goes on, and it is told later what it misses")
            self._fails = True

    def _warn(self, error: Exception, outcome: str) -> None:
        warn(f"{self.called} fails ({_why(error)}); {outcome}", FedhmWarning, stacklevel=3)


def _why(error: Exception) -> str:
    """Return what a tool has raised, in one line: some of them give whole paragraphs."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return os_error_sentence(error)
    return printable(str(error) or repr(error), LONGEST)
