"""The record of a round, one line of JSON: participants, traffic, metrics, what filters did, and how long it took.

The metrics of clients that evaluate on their own test samples come first: pooled, and their spread over the clients.
"""

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
class ClientResult:
    """The metrics of a network on the test samples of one client."""

    client: int
    tier: str  # the client's own
    samples: int
    metrics: Metrics


@dataclass(frozen=True)
class GroupMetrics:
    """The metrics of a network over several clients. In `pooled` every sample counts alike, otherwise every client."""

    clients: int
    samples: int
    pooled: Metrics  # exactly those of all samples together; if a few clients have NaN, of the other clients
    mean: Metrics
    median: Metrics  # over the clients without NaN; a few false or broken clients do not move it
    worst_tenth: Metrics  # the mean over the tenth of the clients at which the network does worst, at least one


@dataclass(frozen=True)
class ClientMetrics:
    """The metrics of a network at the clients: of all together, of groups, and of each client."""

    overall: GroupMetrics
    by_tier: dict[str, GroupMetrics]  # by the clients' tiers
    each: list[ClientResult]  # in the order of their numbers
    by_device: dict[str, GroupMetrics] = field(default_factory=dict)  # left out of files if there are no devices


@dataclass
class Tally:
    """Collects the clients' answers about one network, and computes its metrics from them."""

    objective: Objective
    devices: Sequence[str] = ()  # the names of all clients' devices; empty: they have none
    _answers: list["_ClientSums"] = field(default_factory=list)

    def add(self, client: int, tier: str, samples: int, sums: Tensors) -> None:
        self._answers.append(
            _ClientSums(ClientResult(client, tier, samples, self.objective.results(sums, samples)), sums)
        )

    def result(self, tiers: Sequence[str]) -> ClientMetrics:
        """Return the metrics over all answers; groups are in the order of `tiers`."""
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

    def _group(self, members: Sequence["_ClientSums"]) -> GroupMetrics:
        usable = {name: _usable(members, name) for name in members[0].one.metrics}

        def over(summary: Callable[[Metric, list[float]], float]) -> Metrics:
            known = [metric for metric in self.objective.reported if metric.name in usable]
            return Metrics({m.name: summary(m, [_or_nan(a.metric(m.name)) for a in usable[m.name]]) for m in known})

        return GroupMetrics(
            len(members),
            sum(answer.one.samples for answer in members),
            self._pooled(usable),
            over(lambda _, values: statistics.fmean(values)),
            over(lambda _, values: statistics.median([v for v in values if not math.isnan(v)] or [math.nan])),
            over(_worst_tenth),
        )

    def _pooled(self, usable: Mapping[str, Sequence["_ClientSums"]]) -> Metrics:
        """Return the metrics of all samples together, each over the clients that are usable for it."""
        results: dict[tuple[int, ...], Metrics] = {}  # by clients, which are usually the same for all metrics
        found = {}
        for name, answers in usable.items():
            clients = tuple(answer.one.client for answer in answers)
            if clients not in results:
                sums = reduce(_added, (answer.sums for answer in answers))
                results[clients] = self.objective.results(sums, sum(answer.one.samples for answer in answers))
            found[name] = results[clients][name]
        return Metrics(found)


@dataclass(frozen=True)
class _ClientSums:
    one: ClientResult
    sums: Tensors

    def metric(self, name: str) -> float:
        return self.one.metrics.get(name, math.nan)


def _added(sums: Tensors, more: Tensors) -> Tensors:
    return {name: value + more[name] for name, value in sums.items()}


def _usable(members: Sequence[_ClientSums], metric: str) -> Sequence[_ClientSums]:
    """Return the clients whose metric is finite, if they are more than half; otherwise all clients.

    So one client with NaN, because it lies or has odd samples, does not hide the metrics of the others. A network that
    gives NaN at most clients is not judged by the rest: its metric is NaN.
    """
    numbers = [answer for answer in members if math.isfinite(answer.metric(metric))]
    return numbers if 2 * len(numbers) > len(members) else members


def _worst_tenth(metric: Metric, values: Sequence[float]) -> float:
    sign = 1 if metric.more_is_better else -1
    worst_first = sorted(values, key=lambda value: -math.inf if math.isnan(value) else sign * value)
    return statistics.fmean(worst_first[: math.ceil(len(values) / 10)])


def _or_nan(value: float) -> float:
    """Return the value, or NaN if it is infinite."""
    return value if math.isfinite(value) else math.nan


Item = TypeVar("Item")


@dataclass
class Traffic:
    """The bytes and computation of one tier's participants in a round."""

    clients: int = 0  # tasks: a client with several tasks is counted several times
    answers: int = 0  # tasks whose update was admitted
    down: int = 0  # bytes, server → clients: as the engine counted them, otherwise those of the tensors
    up: int = 0
    macs: int = 0  # of training: MACs per sample × samples, each as often as it is trained on, as the paper counts
    loss: float = 0.0  # of training, mean over the answers


@dataclass
class Simulated:
    """The time that a round takes on the clients' devices. It is computed, not waited for."""

    seconds: float = 0.0  # of all attempts: the time of the slowest client, or the deadline if a client is later
    clients: dict[int, ClientSeconds] = field(default_factory=dict)  # late clients too


@dataclass
class Record:
    """Everything that is kept about a round. Most fields are left out of files if they are empty."""

    round: int
    participants: list[Participant] = field(default_factory=list)  # of the attempt that counted
    metrics: dict[str, Metrics] = field(default_factory=dict)  # by tier; empty if the round was not evaluated
    traffic: dict[str, Traffic] = field(default_factory=dict)  # by tier
    statistics: Traffic = field(default_factory=Traffic)  # for gathering BatchNorm statistics and gradients
    diagnostics: dict[str, float] = field(default_factory=dict)
    dropped: list[dict[str, Any]] = field(default_factory=list)  # updates that were not merged, and why
    # How far each client moved, by part of the updates, tier and client. The bounds of later rounds follow from it.
    norms: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    plans: dict[str, dict[str, int]] = field(default_factory=dict)  # by tier: the ranks chosen after this round
    clipped: list[dict[str, Any]] = field(default_factory=list)  # updates that were longer than their bound
    # How much each client agreed with the others. Later rounds judge by it.
    agreement: dict[int, AgreementScore] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    attempts: int = 1  # until enough updates could be used; traffic, dropped and seconds are those of all attempts
    stopped: str = ""  # why the run ended early after this round
    epsilon: float | None = None  # of differential privacy after this round; None: the run is not private
    clients: dict[str, ClientMetrics] = field(default_factory=dict)  # by tier of the network; empty: none evaluates
    evaluation: Traffic = field(default_factory=Traffic)  # of the clients that evaluate
    simulated: Simulated | None = None  # None: the config has no devices
    device: str = ""  # on which networks ran; several are separated by commas; empty: Flower's nodes chose
    _losses: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)  # by tier

    def all_metrics(self) -> Iterator[Metrics]:
        """Yield the metrics of every network, wherever it was evaluated."""
        yield from self.metrics.values()
        for found in self.clients.values():
            for group in (found.overall, *found.by_tier.values(), *found.by_device.values()):
                yield from (group.pooled, group.mean, group.median, group.worst_tenth)
            yield from (one.metrics for one in found.each)

    def count(self, task: Task, reply: Reply, macs: int) -> None:
        """Count the traffic of one task and its reply: a usable update, or a failure."""
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
        """Keep a false loss of one client from hiding the losses of the others."""
        for tier, losses in self._losses.items():
            self.traffic[tier].loss = typical_loss(losses, self.traffic[tier].loss)

    def discard_findings(self) -> None:
        """Forget the defence's findings about an attempt that failed: later rounds must not judge by it."""
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
        """Add the time of the block to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def timed(self, name: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield `items`, and add the time spent waiting for them to a phase."""
        iterator = iter(items)
        while True:
            with self.phase(name):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    def to_json(self) -> str:
        """Return the record as a line of JSON."""
        table = asdict(self)
        del table["_losses"]
        table["seconds"] = {name: round(value, 4) for name, value in self.seconds.items()}
        for name in ("epsilon", "simulated"):
            if table[name] is None:
                del table[name]
        for name in ("stopped", "norms", "plans", "clipped", "agreement", "device"):  # empty in most runs
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
        """Read a line of a run's records; raises ValueError if it is no record."""
        found = dict(_RecordLine.model_validate_json(line))
        metrics = {tier: Metrics(of_tier) for tier, of_tier in found.pop("metrics").items()}
        return cls(**found, metrics=metrics)


def _names_its_client(entry: dict[str, Any]) -> dict[str, Any]:
    if type(entry.get("client")) is not int:
        raise ValueError("it names no client")
    return entry


_ClientEntry = Annotated[dict[str, Any], AfterValidator(_names_its_client)]


class _RecordLine(BaseModel):
    """A record as it is stored on disk."""

    model_config = ConfigDict(extra="forbid")

    round: int
    participants: list[Participant]
    metrics: dict[str, dict[str, float]]
    traffic: dict[str, Traffic]
    statistics: Traffic
    diagnostics: dict[str, float] = {}
    dropped: list[_ClientEntry] = []
    norms: dict[str, dict[str, dict[int, float]]] = {}
    plans: dict[str, dict[str, int]] = {}
    clipped: list[_ClientEntry] = []
    agreement: dict[int, AgreementScore] = {}
    seconds: dict[str, float] = {}
    attempts: int = 1
    stopped: str = ""
    epsilon: float | None = None
    clients: dict[str, ClientMetrics] = {}
    evaluation: Traffic = Traffic()
    simulated: Simulated | None = None
    device: str = ""
