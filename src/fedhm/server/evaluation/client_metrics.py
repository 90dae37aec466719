"""How a network does at the clients, each on test samples of its own: pooled, and how it is spread over them."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from fedhm.config.sections.objective import Metric, Metrics, Objective
from fedhm.networks.exchange import Tensors


@dataclass(frozen=True)
class OneClient:
    """How the network does on the test samples of one client."""

    client: int
    tier: str  # the client's own
    samples: int
    metrics: Metrics


@dataclass(frozen=True)
class Group:
    """How the network does at some clients. In `pooled` every sample counts alike, in the others every client."""

    clients: int
    samples: int
    pooled: Metrics  # exactly those of all their samples together; where few have no number, of the others
    mean: Metrics
    median: Metrics  # which a few clients that lie, or are broken, do not move; over those that have numbers
    worst_tenth: Metrics  # the mean over the tenth of the clients at which the network does worst, at least one


@dataclass(frozen=True)
class ClientMetrics:
    overall: Group
    by_tier: dict[str, Group]  # by the clients' tiers
    each: list[OneClient]  # in the order of their numbers
    by_device: dict[str, Group] = field(default_factory=dict)  # left out of files where there are no devices


@dataclass
class Tally:
    """The answers of clients on one network."""

    objective: Objective
    devices: Sequence[str] = ()  # of all clients, by name; empty: they have none
    _answers: list["_Answer"] = field(default_factory=list)

    def add(self, client: int, tier: str, samples: int, sums: Tensors) -> None:
        self._answers.append(_Answer(OneClient(client, tier, samples, self.objective.results(sums, samples)), sums))

    def result(self, tiers: Sequence[str]) -> ClientMetrics:
        """Return what all answers come to; groups are in the order of `tiers`."""
        of_tier = {tier: [a for a in self._answers if a.one.tier == tier] for tier in tiers}
        of_device = {
            device: [a for a in self._answers if self.devices[a.one.client] == device]
            for device in dict.fromkeys(self.devices)
        }
        return ClientMetrics(
            self._group(self._answers),
            {tier: self._group(members) for tier, members in of_tier.items() if members},
            [answer.one for answer in self._answers],
            {device: self._group(members) for device, members in of_device.items() if members},
        )

    def _group(self, members: Sequence["_Answer"]) -> Group:
        counted = {name: _counted(members, name) for name in members[0].one.metrics}

        def over(summary: Callable[[Metric, list[float]], float]) -> Metrics:
            known = [metric for metric in self.objective.metrics if metric.name in counted]
            return Metrics({m.name: summary(m, [_or_nan(a.metric(m.name)) for a in counted[m.name]]) for m in known})

        return Group(
            len(members),
            sum(answer.one.samples for answer in members),
            self._pooled(counted),
            over(lambda _, values: statistics.fmean(values)),
            over(lambda _, values: statistics.median([v for v in values if not math.isnan(v)] or [math.nan])),
            over(_worst_tenth),
        )

    def _pooled(self, counted: Mapping[str, Sequence["_Answer"]]) -> Metrics:
        """Return the metrics of all samples together, each of the clients that count for it."""
        results: dict[tuple[int, ...], Metrics] = {}  # by who counts, as a rule the same clients for all metrics
        found = {}
        for name, answers in counted.items():
            clients = tuple(answer.one.client for answer in answers)
            if clients not in results:
                sums = reduce(_added, (answer.sums for answer in answers))
                results[clients] = self.objective.results(sums, sum(answer.one.samples for answer in answers))
            found[name] = results[clients][name]
        return Metrics(found)


@dataclass(frozen=True)
class _Answer:
    one: OneClient
    sums: Tensors

    def metric(self, name: str) -> float:
        return self.one.metrics.get(name, math.nan)


def _added(sums: Tensors, more: Tensors) -> Tensors:
    return {name: value + more[name] for name, value in sums.items()}


def _counted(members: Sequence[_Answer], metric: str) -> Sequence[_Answer]:
    """Return those for which a metric is a number, if they are more than half; otherwise all, of which nothing follows.

    So one client that answers NaN, since it lies or has odd samples, does not hide what the others have; and a network
    that gives NaN at most of them is not judged by the rest.
    """
    numbers = [answer for answer in members if math.isfinite(answer.metric(metric))]
    return numbers if 2 * len(numbers) > len(members) else members


def _worst_tenth(metric: Metric, values: Sequence[float]) -> float:
    sign = 1 if metric.more_is_better else -1
    worst_first = sorted(values, key=lambda value: -math.inf if math.isnan(value) else sign * value)
    return statistics.fmean(worst_first[: math.ceil(len(values) / 10)])


def _or_nan(value: float) -> float:
    """Return the value, or NaN for one that no mean could be made of."""
    return value if math.isfinite(value) else math.nan
