"""A run that is interrupted after a round, in this very process."""

from fedhm.server.record import Record


class Interruption:
    """A watcher that interrupts a run after a round."""

    def __init__(self, after: int) -> None:
        self._after = after

    def started(self, done: int, rounds: int) -> None: ...

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None: ...

    def round_done(self, record: Record) -> None:
        if record.round == self._after:
            raise KeyboardInterrupt
