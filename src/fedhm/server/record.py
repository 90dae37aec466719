"""How a network does at the clients, each on test samples of its own: pooled, and how it is spread over them."""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict

from fedhm.config.objective import Metric, Metrics, Objective
from fedhm.measure.time import ClientSeconds
from fedhm.networks.exchange import Tensors, size_in_bytes
from fedhm.server.filters.clip import typical_loss
from fedhm.server.filters.history import AgreementScore
from fedhm.work.messages import Participant, Reply, Task, Update
from fedhm.work.work import work_of


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


# The records of rounds, one line of JSON each.

Item = TypeVar("Item")


@dataclass
class Traffic:
    """What one tier's participants exchanged and computed in a round."""

    clients: int = 0  # tasks: a client that got several is counted as often
    answers: int = 0  # of these, those whose update could be used
    down: int = 0  # bytes, server → clients: as they travelled, or those of the tensors where nobody counted
    up: int = 0
    macs: int = 0  # of training: MACs per sample × epochs × samples, as the paper counts
    loss: float = 0.0  # of training, mean over the answers


@dataclass
class Simulated:
    """The time that training takes on the clients' devices, which is computed and not waited for."""

    seconds: float = 0.0  # of the round, all attempts: the slowest client's, or the deadline if one is later
    clients: dict[int, ClientSeconds] = field(default_factory=dict)  # also of those who are late


@dataclass
class Record:
    round: int
    participants: list[Participant] = field(default_factory=list)  # of the attempt that counted
    metrics: dict[str, Metrics] = field(default_factory=dict)  # by tier; empty where the round was not evaluated
    traffic: dict[str, Traffic] = field(default_factory=dict)  # by tier
    statistics: Traffic = field(default_factory=Traffic)  # of gathering BatchNorm statistics
    diagnostics: dict[str, float] = field(default_factory=dict)
    dropped: list[dict[str, Any]] = field(default_factory=list)  # updates that were not merged, and why
    # By part of the updates, tier and client: how far it moved, as the bounds of later rounds follow from it
    norms: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    plans: dict[str, dict[str, int]] = field(default_factory=dict)  # by tier: ranks that were chosen after this round
    clipped: list[dict[str, Any]] = field(default_factory=list)  # updates that were longer than their bound
    # By client: how it went along with the others, their median and spread, as later rounds judge by it
    agreement: dict[int, AgreementScore] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    attempts: int = 1  # until enough updates could be used; traffic, the dropped and seconds are those of all
    stopped: str = ""  # why the run ended with this round, before its last one
    epsilon: float | None = None  # of differential privacy, after this round; None, and left out of files: none
    # Of clients that evaluate; both are left out of files where none did
    clients: dict[str, ClientMetrics] = field(default_factory=dict)  # by tier of the network
    evaluation: Traffic = field(default_factory=Traffic)
    simulated: Simulated | None = None  # None, and left out of files: the config has no devices
    _losses: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)  # by tier

    def all_metrics(self) -> Iterator[Metrics]:
        """Yield the metrics of every network, wherever it was evaluated."""
        yield from self.metrics.values()
        for found in self.clients.values():
            for group in (found.overall, *found.by_tier.values(), *found.by_device.values()):
                yield from (group.pooled, group.mean, group.median, group.worst_tenth)
            yield from (one.metrics for one in found.each)

    def count(self, task: Task, reply: Reply, macs: int) -> None:
        """Count one task and what came of it: an update that may be used, or in its place a failure."""
        traffic = self._traffic_of(task)
        traffic.clients += 1
        traffic.down += size_in_bytes(task.tensors) if reply.down is None else reply.down
        traffic.up += reply.up or 0
        traffic.macs += macs
        if isinstance(reply, Update):
            traffic.up += size_in_bytes(reply.tensors) if reply.up is None else 0
            traffic.answers += 1
            traffic.loss += (reply.loss - traffic.loss) / traffic.answers
            if work_of(task.kind).trains:
                self._losses.setdefault(task.tier, []).append(reply.loss)

    def bound_losses(self) -> None:
        """Let no loss that a client made up hide those of the others."""
        for tier, losses in self._losses.items():
            self.traffic[tier].loss = typical_loss(losses, self.traffic[tier].loss)

    def discard_findings(self) -> None:
        """Forget what defence found in an attempt that does not count; later rounds must not judge by it."""
        self.norms.clear()
        self.clipped.clear()
        self.agreement.clear()

    def _traffic_of(self, task: Task) -> Traffic:
        work = work_of(task.kind)
        if work.trains:
            return self.traffic.setdefault(task.tier, Traffic())
        return self.evaluation if work.tests else self.statistics

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def timed(self, name: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield `items`; the time spent waiting for them counts for phase `name`."""
        iterator = iter(items)
        while True:
            with self.phase(name):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    def to_json(self) -> str:
        table = asdict(self)
        del table["_losses"]
        table["seconds"] = {name: round(value, 4) for name, value in self.seconds.items()}
        for name in ("epsilon", "simulated"):
            if table[name] is None:
                del table[name]
        for name in ("stopped", "norms", "plans", "clipped", "agreement"):  # most runs have no such
            if not table[name]:
                del table[name]
        if not self.evaluation.clients:
            del table["clients"], table["evaluation"]
        for of_tier in table.get("clients", {}).values():
            if not of_tier["by_device"]:
                del of_tier["by_device"]
        return json.dumps(table)

    @classmethod
    def from_json(cls, line: str | bytes) -> "Record":
        """Read a line of a run's records; raises ValueError if it is not one."""
        found = dict(_Line.model_validate_json(line))
        metrics = {tier: Metrics(of_tier) for tier, of_tier in found.pop("metrics").items()}
        return cls(**found, metrics=metrics)


def _names_its_client(entry: dict[str, Any]) -> dict[str, Any]:
    if type(entry.get("client")) is not int:
        raise ValueError("it names no client")
    return entry


_OfClient = Annotated[dict[str, Any], AfterValidator(_names_its_client)]


class _Line(BaseModel):
    """A record as it lies on disk."""

    model_config = ConfigDict(extra="forbid")

    round: int
    participants: list[Participant]
    metrics: dict[str, dict[str, float]]
    traffic: dict[str, Traffic]
    statistics: Traffic
    diagnostics: dict[str, float] = {}
    dropped: list[_OfClient] = []
    norms: dict[str, dict[str, dict[int, float]]] = {}
    plans: dict[str, dict[str, int]] = {}
    clipped: list[_OfClient] = []
    agreement: dict[int, AgreementScore] = {}
    seconds: dict[str, float] = {}
    attempts: int = 1
    stopped: str = ""
    epsilon: float | None = None
    clients: dict[str, ClientMetrics] = {}
    evaluation: Traffic = Traffic()
    simulated: Simulated | None = None
