"""What all trackers have in common: a resumed run goes on in the same tracked run, and no failure costs a round."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar
from warnings import warn

from torch import nn

from fedhm.errors import FedhmError, FedhmWarning
from fedhm.machine.places import in_words
from fedhm.machine.printable import printable
from fedhm.runs.tier_files import save_tier, tier_file
from fedhm.server.record import Record
from fedhm.server.watcher import About
from fedhm.tracking.memory import Remembered, recall, remember
from fedhm.tracking.values import values

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
        return in_words(error)
    return printable(str(error) or repr(error), LONGEST)
