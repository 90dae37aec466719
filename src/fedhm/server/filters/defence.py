"""Defence against hostile clients, `[server] robust`: updates are limited by comparison with other clients."""

from collections.abc import Iterator, Sequence

from fedhm.config.schema import ResolvedConfig, ServerConfig
from fedhm.errors import FedhmError
from fedhm.networks.spec import NetworkSpec
from fedhm.server.facts import TaskFacts
from fedhm.server.filters.agreement import centered_clip_judge, drop_disagreeing, judge_together, krum_judge
from fedhm.server.filters.clip import DefenceLog, clip
from fedhm.server.filters.filter import Arrival, RoundFilter
from fedhm.server.filters.history import AgreementHistory, Layout, NormHistory, update_delta
from fedhm.server.record import Record


def check_attackers(config: ServerConfig, participants: int) -> None:
    """Refuse more hostile clients than Krum can find among a round's participants."""
    if config.robust == "krum" and participants < (needed := 2 * config.attackers + 3):
        raise FedhmError(
            f"server.robust = 'krum' tells server.attackers = {config.attackers} only among {needed} or more clients, "
            f"but {participants} take part in a round: lower it, or raise federation.participation"
        )


class Defence(RoundFilter):
    """Clips updates that are too long, then applies the rule of the settings.

    Coordinate-wise rules are not here: the method's mean applies them (`methods/means.py`).

    one_model  all networks of the method are versions of one model
    """

    def __init__(self, config: ResolvedConfig, facts: TaskFacts, one_model: bool) -> None:
        self._config, self._facts, self._one_model = config.server, facts, one_model
        self._learning_rate = config.train.learning_rate
        self.restore([])

    def restore(self, records: Sequence[Record]) -> None:
        self._norms, self._agreement = NormHistory(self._learning_rate), AgreementHistory()
        for record in records:
            self._learn(record)

    def finish(self, records: Sequence[Record]) -> None:
        self._learn(records[-1])
        if self._config.robust != "none":
            records[-1].bound_losses()

    def _learn(self, record: Record) -> None:
        self._norms.add(record.round, record.norms)
        self._agreement.add(record.agreement)

    def updates(self, arrivals: Iterator[Arrival], record: Record) -> Iterator[Arrival]:
        if self._config.robust == "none":
            yield from arrivals
            return
        number, log = record.round, DefenceLog(record.norms, record.clipped, record.dropped, record.agreement)
        deltas = (update_delta(each.task, each.update, self._layout(each.task.network)) for each in arrivals)
        # Every rule clips first: no rule alone helps against one update that is far longer than all others.
        passing = clip(deltas, self._norms, number, log)
        if self._config.robust == "agreement":
            passing = drop_disagreeing(
                passing, self._norms, number, log, self._layout, self._one_model, self._agreement
            )
        elif self._config.robust == "centered-clip":
            rule = centered_clip_judge(self._norms, number, log)
            passing = judge_together(passing, rule, self._layout, self._one_model)
        elif self._config.robust == "krum":
            rule = krum_judge(self._config.attackers, log)
            passing = judge_together(passing, rule, self._layout, self._one_model)
        for delta in passing:
            yield Arrival(delta.task, delta.update)

    def _layout(self, network: NetworkSpec) -> Layout:
        return self._facts.network(network).layout
