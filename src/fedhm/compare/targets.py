"""What it took until a tier first reached a target, as the paper counts it, relative to the full model."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedhm.compare.compared import Compared, computed, sent, so_far
from fedhm.config.sections.objective import Metric
from fedhm.runs.history import Run
from fedhm.server.record import Traffic


@dataclass(frozen=True)
class Reached:
    """Ratios to the full model on every client; None where a seed never got there."""

    entry: Compared
    tier: str
    communication: float | None
    computation: float | None


def full_model(entries: Sequence[Compared]) -> Compared | None:
    """Return the entry that the others are measured by."""
    return next((entry for entry in entries if entry.first.config.method.is_full_model), None)


def common_target(entries: Sequence[Compared]) -> float:
    """Return the best rounded value that the smallest tier of every entry reaches with every seed."""
    metric = entries[0].metric
    best = [metric.best(entry.values(run, entry.tiers[-1]).values()) for entry in entries for run in entry.runs]
    return _easier(metric, metric.worst(best))


def _easier(metric: Metric, value: float) -> float:
    """Round to a whole percent, or to two digits where it is no share, never to what is harder to reach."""
    digits = 2 if metric.percent or not value else 1 - math.floor(math.log10(abs(value)))
    scale = 10.0**digits
    down = math.floor(value * scale + 1e-9)
    rounded = (down if metric.more_is_better else -math.floor(-value * scale + 1e-9)) / scale
    return rounded if metric.reaches(value, rounded) else value  # which differ in their last bit


def costs_to_reach(target: float, entries: Sequence[Compared], reference: Compared) -> list[Reached]:
    """Return what it took every entry's largest and smallest tier, or its only one, to reach the target."""
    full = reference.tiers[0]
    of_reference = [_cost(reference, full, target, what) for what in (sent, computed)]
    reached: list[Reached] = []
    for entry in entries:
        for tier in dict.fromkeys((entry.tiers[0], entry.tiers[-1])):
            costs = [_cost(entry, tier, target, what) for what in (sent, computed)]
            ratios = [None if c is None or not r else c / r for c, r in zip(costs, of_reference, strict=True)]
            reached.append(Reached(entry, tier, *ratios))
    return reached


@dataclass(frozen=True)
class Timed:
    """Simulated seconds of a tier, mean over the seeds."""

    entry: Compared
    tier: str
    to_target: float | None  # None where a seed never got there
    of_run: float


def times_to_reach(target: float, entries: Sequence[Compared]) -> list[Timed]:
    """Return how long every entry's largest and smallest tier took to reach the target; nothing without devices."""
    if not all(run.seconds_so_far() for entry in entries for run in entry.runs):
        return []
    return [
        Timed(entry, tier, _spent(entry, tier, target, Run.seconds_so_far), _whole(entry))
        for entry in entries
        for tier in dict.fromkeys((entry.tiers[0], entry.tiers[-1]))
    ]


def _whole(entry: Compared) -> float:
    return statistics.fmean(run.seconds_so_far()[-1] for run in entry.runs)


def _cost(entry: Compared, tier: str, target: float, what: Callable[[Traffic], int]) -> float | None:
    return _spent(entry, tier, target, lambda run: so_far(run, what))


def _spent(entry: Compared, tier: str, target: float, so_far: Callable[[Run], Sequence[float]]) -> float | None:
    """Return what the whole federation spent to reach the target, mean over the seeds; None if a seed never did."""
    spent: list[float] = []
    for run in entry.runs:
        rounds = (number for number, value in entry.values(run, tier).items() if entry.metric.reaches(value, target))
        first = next(rounds, None)
        if first is None:
            return None
        spent.append(so_far(run)[first - 1])
    return statistics.fmean(spent)
