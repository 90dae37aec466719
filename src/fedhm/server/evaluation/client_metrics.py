"""How a network does at the clients, each on test samples of its own: pooled, and how it is spread over them."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
    pooled: Metrics  # exactly those of all their samples together
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
class _Sums:
    samples: int = 0
    sums: Tensors = field(default_factory=dict)

    def add(self, samples: int, sums: Tensors) -> None:
        self.samples += samples
        self.sums = {name: self.sums[name] + value if self.sums else value for name, value in sums.items()}


@dataclass
class Tally:
    """The answers of clients on one network, added up as they come."""

    objective: Objective
    devices: Sequence[str] = ()  # of all clients, by name; empty: they have none
    _of_tier: dict[str, _Sums] = field(default_factory=dict)
    _of_device: dict[str, _Sums] = field(default_factory=dict)
    _overall: _Sums = field(default_factory=_Sums)
    _each: list[OneClient] = field(default_factory=list)

    def add(self, client: int, tier: str, samples: int, sums: Tensors) -> None:
        self._each.append(OneClient(client, tier, samples, self.objective.results(sums, samples)))
        self._overall.add(samples, sums)
        self._of_tier.setdefault(tier, _Sums()).add(samples, sums)
        if self.devices:
            self._of_device.setdefault(self.devices[client], _Sums()).add(samples, sums)

    def result(self, tiers: Sequence[str]) -> ClientMetrics:
        """Return what all answers come to; groups are in the order of `tiers`."""
        of_tier = {tier: [one for one in self._each if one.tier == tier] for tier in tiers if tier in self._of_tier}
        of_device = {
            device: [one for one in self._each if self.devices[one.client] == device]
            for device in dict.fromkeys(self.devices)
            if device in self._of_device
        }
        return ClientMetrics(
            self._group(self._overall, self._each),
            {tier: self._group(self._of_tier[tier], members) for tier, members in of_tier.items()},
            self._each,
            {device: self._group(self._of_device[device], members) for device, members in of_device.items()},
        )

    def _group(self, total: _Sums, members: Sequence[OneClient]) -> Group:
        def over(summary: Callable[[Metric, list[float]], float]) -> Metrics:
            names = [metric for metric in self.objective.metrics if metric.name in members[0].metrics]
            return Metrics({m.name: summary(m, [_or_nan(one.metrics[m.name]) for one in members]) for m in names})

        return Group(
            len(members),
            total.samples,
            self.objective.results(total.sums, total.samples),
            over(lambda _, values: statistics.fmean(values)),
            over(lambda _, values: statistics.median([v for v in values if not math.isnan(v)] or [math.nan])),
            over(_worst_tenth),
        )


def _worst_tenth(metric: Metric, values: Sequence[float]) -> float:
    sign = 1 if metric.more_is_better else -1
    worst_first = sorted(values, key=lambda value: -math.inf if math.isnan(value) else sign * value)
    return statistics.fmean(worst_first[: math.ceil(len(values) / 10)])


def _or_nan(value: float) -> float:
    """Return the value, or NaN for one that no mean could be made of."""
    return value if math.isfinite(value) else math.nan
