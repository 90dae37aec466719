"""From the updates that were let in to those that are merged: `[server] robust`, with what it found in the record."""

from collections.abc import Callable, Iterator, Sequence

from fedhm.config.schema import ResolvedConfig, ServerConfig
from fedhm.errors import FedhmError
from fedhm.server.collect import Guard, Intake
from fedhm.server.filters.agreement import by_centered_clip, by_krum, drop_disagreeing, judged_together
from fedhm.server.filters.clip import Findings, clip
from fedhm.server.filters.history import History, Layout, Standing, moved
from fedhm.server.record import Record
from fedhm.work.messages import Task, Update


def check_attackers(config: ServerConfig, participants: int) -> None:
    """Refuse to let Krum look for more hostile clients than it can tell among a round's participants."""
    if config.robust == "krum" and participants < (needed := 2 * config.attackers + 3):
        raise FedhmError(
            f"server.robust = 'krum' tells server.attackers = {config.attackers} only among {needed} or more clients, "
            f"but {participants} take part in a round: lower it, or raise federation.participation"
        )


class Defence:
    """Guards a run's rounds against hostile clients, which are told by the rounds before.

    one_model  all networks of the method are versions of one model
    """

    def __init__(self, config: ResolvedConfig, intake: Intake, one_model: bool, records: Sequence[Record]) -> None:
        self._config, self._one_model = config.server, one_model
        self._layout: Callable[[str], Layout] = lambda network: intake.facts(network).layout
        self._history = History(config.train.learning_rate)
        self._standing = Standing()
        for record in records:
            self._learn(record)

    def done(self, record: Record) -> None:
        """Learn from a round that was merged."""
        self._learn(record)
        if self._config.robust != "none":
            record.bound_losses()

    def _learn(self, record: Record) -> None:
        self._history.add(record.round, record.norms)
        self._standing.add(record.agreement)

    def guard(self, record: Record) -> Guard | None:
        """Return what guards a round; None: nothing does."""
        if self._config.robust == "none":
            return None

        def guard(admitted: Iterator[tuple[Task, Update]]) -> Iterator[Update]:
            arriving = (moved(task, update, self._layout(task.network)) for task, update in admitted)
            findings = Findings(record.norms, record.clipped, record.dropped, record.agreement)
            told = (self._history, record.round, findings)
            compared = (self._layout, self._one_model)
            passing = drop_disagreeing(clip(arriving, *told), *told, *compared, self._standing)  # before every rule
            if self._config.robust == "centered-clip":
                passing = judged_together(passing, by_centered_clip(*told), *compared)
            elif self._config.robust == "krum":
                passing = judged_together(passing, by_krum(self._config.attackers, findings), *compared)
            for each in passing:
                yield each.update

        return guard
