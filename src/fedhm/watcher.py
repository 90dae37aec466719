"""Is told how a run goes."""

from typing import Protocol

from fedhm.records import Record


class Watcher(Protocol):
    def started(self, done: int, rounds: int) -> None: ...
    def task_done(self, round_number: int, what: str, done: int, of: int) -> None: ...
    def round_done(self, record: Record) -> None: ...
