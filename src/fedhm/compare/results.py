"""The results of a comparison: the runs of each entry, one for each seed, their statistics and their costs."""

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from fedhm.config.method import Change
from fedhm.config.objective import Metric
from fedhm.errors import FedhmError
from fedhm.report.comparable import find_difference
from fedhm.runs.history import Run, read_runs
from fedhm.server.record import Record, Traffic


class Spread(NamedTuple):
    """A mean and a deviation over the seeds."""

    mean: float
    deviation: float | None  # of the sample; None for one seed


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class EntryRuns:
    """The runs of one method with the same settings, one for each seed."""

    label: str
    runs: Sequence[Run]
    declared: Sequence[Change] = ()  # settings outside [method] in which it may differ from other entries

    @property
    def first(self) -> Run:
        """Return one of the runs, for everything that does not depend on the seed."""
        return self.runs[0]

    @property
    def metric(self) -> Metric:
        """Return the metric that runs are compared by."""
        return self.first.config.objective.headline

    @property
    def tiers(self) -> list[str]:
        """Return the tiers, largest first."""
        return self.first.tiers

    @property
    def seeds(self) -> list[int]:
        return sorted(run.config.seed for run in self.runs)

    @cached_property
    def levels(self) -> list[str]:
        """Return the tier of each capability level, strongest first. A tier of two levels comes twice."""
        sizes = sorted(self.first.config.method.shares, reverse=True)
        distinct = list(dict.fromkeys(sizes))
        if len(distinct) != len(self.tiers):
            return self.tiers
        return [self.tiers[distinct.index(size)] for size in sizes]

    def values(self, run: Run, tier: str) -> dict[int, float]:
        """Return the metric of a run's tier by evaluated round, as it was recorded."""
        return {record.round: record.metrics[tier][self.metric.name] for record in run.evaluated}

    def finals(self, tier: str) -> dict[int, float]:
        """Return the metric after the last round by seed, scaled as tables show it: a share in percent."""
        return {
            run.config.seed: self.metric.scaled(list(self.values(run, tier).values())[-1])
            for run in sorted(self.runs, key=lambda run: run.config.seed)
        }

    def final(self, tier: str) -> Spread:
        return spread(list(self.finals(tier).values()))

    def bests(self, tier: str) -> dict[int, float]:
        """Return the metric of the best evaluated round by seed, scaled as `finals`."""
        return {
            run.config.seed: self.metric.scaled(self.metric.best(self.values(run, tier).values()))
            for run in sorted(self.runs, key=lambda run: run.config.seed)
        }

    def best(self, tier: str) -> Spread:
        return spread(list(self.bests(tier).values()))

    def curve(self, tier: str) -> list[tuple[int, Spread]]:
        """Return the metric by round, scaled as `final`, at the rounds in which all runs were evaluated."""
        values = [self.values(run, tier) for run in self.runs]
        shared = sorted(set.intersection(*(set(of_run) for of_run in values)))
        return [(number, spread([self.metric.scaled(of_run[number]) for of_run in values])) for number in shared]

    def client_bytes(self, tier: str) -> float | None:
        """Return the bytes of one participant of the tier in a round, down and up; None if the tier never had one."""
        return _known_mean(run.bytes_per_client(tier) for run in self.runs)

    def budget(self, tier: str) -> tuple[float | None, float | None]:
        """Return the bytes and MACs of a client of the tier in the whole training, with an average number of turns.

        So it does not matter how often clients of the tier were drawn, nor whether clients keep their tier.
        """
        a_turn = [(run.turns, run.bytes_per_client(tier), run.macs_per_client(tier)) for run in self.runs]
        spent_bytes = _known_mean(None if sent is None else turns * sent for turns, sent, _ in a_turn)
        return spent_bytes, _known_mean(None if macs is None else turns * macs for turns, _, macs in a_turn)

    def bytes(self, tier: str | None = None) -> float:
        """Return the bytes of the whole training of the tier's participants, or of all; mean over the seeds."""
        return statistics.fmean(_total(run.records, bytes_sent, tier) for run in self.runs)

    def macs(self, tier: str | None = None) -> float:
        return statistics.fmean(_total(run.records, macs_computed, tier) for run in self.runs)


def _known_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def bytes_sent(traffic: Traffic) -> int:
    return traffic.down + traffic.up


def macs_computed(traffic: Traffic) -> int:
    return traffic.macs


def cumulative(run: Run, cost: Callable[[Traffic], int]) -> list[int]:
    """Return the training costs of all clients together up to the end of each round."""
    return list(accumulate(_total([record], cost) for record in run.records))


def _total(records: Sequence[Record], cost: Callable[[Traffic], int], tier: str | None = None) -> int:
    return sum(cost(traffic) for record in records for t, traffic in record.traffic.items() if tier in (None, t))


def incomparable_entries(entries: Sequence[EntryRuns], tuned: Collection[str] = ()) -> str | None:
    """Return why entries cannot be compared, or None. Seeds must agree, too, and runs must be complete."""
    runs = [run for entry in entries for run in entry.runs]
    for run in runs:
        if not run.complete:
            return f"{run.name} has done {len(run.records)} of its {run.config.train.rounds} rounds"
    if found := find_difference(runs, tuned, [entry.declared for entry in entries for _ in entry.runs]):
        return found
    for entry in entries:
        if len(set(entry.seeds)) < len(entry.seeds):
            return f"{entry.label} has two runs with the same settings and seed"
        if entry.seeds != entries[0].seeds:
            a, b = (", ".join(map(str, e.seeds)) for e in (entries[0], entry))
            return f"{entries[0].label} was run with the seeds {a}, {entry.label} with {b}"
    return None


def read_entries(paths: Sequence[Path], declared: Callable[[Path], Sequence[Change]] = lambda _: ()) -> list[EntryRuns]:
    """Read runs. Those that differ only in the seed form one entry, named after their folders.

    declared  gives the changes that the entry of a run's folder declares
    """
    groups: dict[str, list[Run]] = {}
    changes: dict[str, list[Sequence[Change]]] = {}
    folders = find_run_folders(paths)
    for folder, run in zip(folders, read_runs(folders), strict=True):
        groups.setdefault(_settings(run), []).append(run)
        changes.setdefault(_settings(run), []).append(declared(folder))
    labels = [re.sub(r"-seed\d+$", "", runs[0].name) for runs in groups.values()]
    return [
        EntryRuns(
            runs[0].name if labels.count(label) > 1 else label,
            sorted(runs, key=lambda run: run.config.seed),
            [change for change in changes[key][0] if all(change in own for own in changes[key])],
        )
        for label, (key, runs) in zip(labels, groups.items(), strict=True)
    ]


def find_run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of runs: each path is one, or a folder that holds several."""
    folders = [folder for path in paths for folder in _run_folders(path)]
    if not folders:
        raise FedhmError("there are no runs to compare: name their folders, or one that holds them")
    return folders


def _run_folders(path: Path) -> Iterator[Path]:
    """Yield `path` itself, or the runs in it. Tables, plots and tuning runs, which globs match, are skipped."""
    if (path / "config.toml").exists():
        yield path
    elif path.is_dir():
        found = sorted(file.parent for file in path.glob("*/config.toml"))
        if not found and not any(path.glob("*/*/config.toml")):
            raise FedhmError(f"{path} is not the folder of a run, and holds none: name the folders of runs")
        yield from found
    elif not path.exists():
        raise FedhmError(f"there is no folder {path}")


def _settings(run: Run) -> str:
    apart = ("seed", "data.folder", "engine.", "tracking.")
    return str([(key, value) for key, value in run.config.dotted().items() if not key.startswith(apart)])


# The cost until a tier first reaches a target, relative to the full model, as in the paper.


@dataclass(frozen=True)
class TargetCost:
    """Costs relative to the full model on every client; None if a seed never reached the target."""

    entry: EntryRuns
    tier: str
    communication: float | None
    computation: float | None


def full_model(entries: Sequence[EntryRuns]) -> EntryRuns | None:
    """Return the entry that trains the full model on every client, if there is one."""
    return next((entry for entry in entries if entry.first.config.method.is_full_model), None)


def common_target(entries: Sequence[EntryRuns]) -> float:
    """Return the best round number that the smallest tier of every entry reaches with every seed."""
    metric = entries[0].metric
    best = [metric.best(entry.values(run, entry.tiers[-1]).values()) for entry in entries for run in entry.runs]
    return _easier(metric, metric.worst(best))


def _easier(metric: Metric, value: float) -> float:
    """Round to a whole percent, or to two digits if it is no share, in the direction that is easier to reach."""
    digits = 2 if metric.percent or not value else 1 - math.floor(math.log10(abs(value)))
    scale = 10.0**digits
    down = math.floor(value * scale + 1e-9)
    rounded = (down if metric.more_is_better else -math.floor(-value * scale + 1e-9)) / scale
    return rounded if metric.reaches(value, rounded) else value  # rounding may differ in the last bit


def costs_to_reach(target: float, entries: Sequence[EntryRuns], reference: EntryRuns) -> list[TargetCost]:
    """Return the costs until the largest and the smallest tier of each entry reach the target."""
    full = reference.tiers[0]
    of_reference = [_cost(reference, full, target, cost) for cost in (bytes_sent, macs_computed)]
    reached: list[TargetCost] = []
    for entry in entries:
        for tier in dict.fromkeys((entry.tiers[0], entry.tiers[-1])):
            costs = [_cost(entry, tier, target, cost) for cost in (bytes_sent, macs_computed)]
            ratios = [None if c is None or not r else c / r for c, r in zip(costs, of_reference, strict=True)]
            reached.append(TargetCost(entry, tier, *ratios))
    return reached


@dataclass(frozen=True)
class TargetTime:
    """Simulated seconds of a tier, mean over the seeds."""

    entry: EntryRuns
    tier: str
    to_target: float | None  # None if a seed never reached the target
    whole_run: float


def times_to_reach(target: float, entries: Sequence[EntryRuns]) -> list[TargetTime]:
    """Return the times until the largest and the smallest tier of each entry reach the target; none without devices."""
    if not all(run.seconds_so_far() for entry in entries for run in entry.runs):
        return []
    return [
        TargetTime(entry, tier, _spent(entry, tier, target, Run.seconds_so_far), _whole_run(entry))
        for entry in entries
        for tier in dict.fromkeys((entry.tiers[0], entry.tiers[-1]))
    ]


def _whole_run(entry: EntryRuns) -> float:
    return statistics.fmean(run.seconds_so_far()[-1] for run in entry.runs)


def _cost(entry: EntryRuns, tier: str, target: float, cost: Callable[[Traffic], int]) -> float | None:
    return _spent(entry, tier, target, lambda run: cumulative(run, cost))


def _spent(entry: EntryRuns, tier: str, target: float, so_far: Callable[[Run], Sequence[float]]) -> float | None:
    """Return the cost of all clients until the target is reached, mean over the seeds; None if a seed never did."""
    spent: list[float] = []
    for run in entry.runs:
        rounds = (number for number, value in entry.values(run, tier).items() if entry.metric.reaches(value, target))
        first = next(rounds, None)
        if first is None:
            return None
        spent.append(so_far(run)[first - 1])
    return statistics.fmean(spent)
