"""Who is told how a run goes: progress bars, trackers, and whatever a user brings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import nn

from fedhm.config.settings import Config
from fedhm.measure.cost import Cost
from fedhm.server.record import Record


class Watcher(Protocol):
    """An object that is told how a run goes: `fedhm.run(..., watchers=[...])`.

    Any object that has these methods is one. It is told of a round once the round is on disk. What it raises ends the
    run, which can be resumed.
    """

    def started(self, done: int, rounds: int) -> None:
        """Say that the rounds begin: so many are done already, of so many."""

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None:
        """Say that a client has answered: `what` is the kind of its work, `done` of `of` such tasks are over."""

    def round_done(self, record: Record) -> None:
        """Say what a round left behind."""


@dataclass(frozen=True)
class About:
    """What is known of a run when it begins, or is resumed."""

    config: Config
    costs: Mapping[str, Cost]  # by tier
    records: Sequence[Record]  # of the rounds that are done already
    folder: Path | None  # None: it is not kept on disk


@runtime_checkable
class RunWatcher(Watcher, Protocol):
    """A watcher that has these as well is told what the run is, what it ended with, and when nothing more comes."""

    def begun(self, about: About) -> None:
        """Say what the run is, before `started`."""

    def ended(self, networks: Mapping[str, nn.Module]) -> None:
        """Say that all rounds are done, with the final model of every tier."""

    def close(self) -> None:
        """Say that nothing more comes: the run has ended, failed, or was stopped, perhaps before it had begun."""


def run_watchers(watchers: Sequence[Watcher]) -> list[RunWatcher]:
    """Return those of the watchers that are told of the whole run, too."""
    return [watcher for watcher in watchers if isinstance(watcher, RunWatcher)]
