"""What it took until a tier first reached a target accuracy, as the paper counts it, relative to the full model."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedhm.compare.compared import Compared, computed, sent, so_far
from fedhm.config.method import FedAvgConfig
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
    """The entry that the others are measured by."""
    for entry in entries:
        method = entry.first.config.method
        if isinstance(method, FedAvgConfig) and method.tier == 1:
            return entry
    return None


def common_target(entries: Sequence[Compared]) -> float:
    """The largest whole percent that the smallest tier of every entry reaches with every seed."""
    best = min(_best(run, entry.tiers[-1]) for entry in entries for run in entry.runs)
    return math.floor(100 * best + 1e-9) / 100


def costs_to_reach(target: float, entries: Sequence[Compared], reference: Compared) -> list[Reached]:
    """Of every entry's largest and smallest tier, or only one."""
    full = reference.tiers[0]
    of_reference = [_cost(reference, full, target, what) for what in (sent, computed)]
    reached: list[Reached] = []
    for entry in entries:
        for tier in dict.fromkeys((entry.tiers[0], entry.tiers[-1])):
            costs = [_cost(entry, tier, target, what) for what in (sent, computed)]
            ratios = [c / r if c and r else None for c, r in zip(costs, of_reference, strict=True)]
            reached.append(Reached(entry, tier, *ratios))
    return reached


def _cost(entry: Compared, tier: str, target: float, what: Callable[[Traffic], int]) -> float | None:
    """Of the whole federation, mean over the seeds."""
    spent: list[int] = []
    for run in entry.runs:
        rounds = (record.round for record in run.evaluated if record.scores[tier].accuracy >= target)
        first = next(rounds, None)
        if first is None:
            return None
        spent.append(so_far(run, what)[first - 1])
    return statistics.fmean(spent)


def _best(run: Run, tier: str) -> float:
    return max(record.scores[tier].accuracy for record in run.evaluated)
