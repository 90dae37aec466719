"""When a run ends before its last round, and which of its rounds was the best: all of it follows from the records."""

from collections.abc import Sequence

from fedhm.config.sections.objective import Metric, Metrics
from fedhm.config.sections.training import StopConfig
from fedhm.errors import FedhmError
from fedhm.server.record import Record


class Stopping:
    """Looks at the headline metric of one tier's model.

    at_clients  the server has no test set: unless the settings say otherwise, the median over clients counts
    """

    def __init__(self, config: StopConfig, metric: Metric, tiers: Sequence[str], *, at_clients: bool = False) -> None:
        if config.tier and config.tier not in tiers:
            raise FedhmError(f"stop.tier: there is no tier '{config.tier}', known are {', '.join(tiers)}")
        if metric.percent and config.target is not None and config.target > 1:
            raise FedhmError(f"stop.target = {config.target:g}, but {metric.name} is a share: 97 % is 0.97")
        self.active = config.active
        self._config, self._metric, self._tier = config, metric, config.tier or tiers[0]
        self._by_median = at_clients and config.clients == "median"

    def reason(self, records: Sequence[Record]) -> str:
        """Return why a run is to end after the last of these rounds, as part of a sentence; empty if it is not."""
        found = self._values(records)
        if not found or records[-1].round not in found:
            return ""
        target, patience, metric = self._config.target, self._config.patience, self._metric
        which = " in the median over clients" if self._by_median else ""
        if target is not None and metric.reaches(found[records[-1].round], target):
            return f"tier {self._tier} reached {metric.goal(target)}{which}"
        last = self._last_improvement(found, self._config.min_change)
        waited = [number for number in found if number > last]
        if patience and len(waited) >= patience:
            since = f"since round {last}" if last else "since the start"
            more = f" by more than {self._config.min_change:g}" if self._config.min_change else ""
            improved = f"did not improve{which}{more} {since}"
            return f"the {metric.name} of tier {self._tier} {improved}, in {len(waited)} evaluations"
        return ""

    def best(self, records: Sequence[Record]) -> int:
        """Return the round after which the model was best; 0 if none was evaluated, or a run may not end early."""
        return self._last_improvement(self._values(records), 0.0) if self.active else 0

    def _values(self, records: Sequence[Record]) -> dict[int, float]:
        return {r.round: self._found(r)[self._metric.name] for r in records if r.metrics}

    def _found(self, record: Record) -> Metrics:
        return record.clients[self._tier].overall.median if self._by_median else record.metrics[self._tier]

    def _last_improvement(self, values: dict[int, float], least: float) -> int:
        """Return the last round that was better than the best before it by more than `least`; 0 if none ever was."""
        sign = 1 if self._metric.more_is_better else -1
        last, best = 0, -float("inf")
        for number, value in values.items():
            if sign * value > best + least:  # never of NaN
                last, best = number, sign * value
        return last
