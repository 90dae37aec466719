"""The paper's table: a row for each capability level, a column for each method or family of one-tier methods."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedhm.compare.compared import Compared, Spread, spread
from fedhm.config.sections.objective import Metric
from fedhm.runs.history import Run


@dataclass(frozen=True)
class Place:
    """What one entry has in one row."""

    entry: Compared
    tier: str
    shares: int  # how many capability levels train this tier

    @property
    def parameters(self) -> int:
        return self.entry.first.costs[self.tier].parameters

    @property
    def final(self) -> Spread:
        return self.entry.final(self.tier)

    def spent_so_far(self, spent: Callable[[Run], Sequence[float]]) -> list[float]:
        """Return what was spent up to each evaluated round, mean over the seeds."""
        sums = [spent(run) for run in self.entry.runs]
        return [statistics.fmean(of_run[n - 1] for of_run in sums) for n, _ in self.entry.curve(self.tier)]

    def minus(self, other: "Place") -> Spread:
        """Return by how much the metric differs from another's, seed by seed: what a seed does to both cancels."""
        own, others = self.entry.finals(self.tier), other.entry.finals(other.tier)
        return spread([own[seed] - others[seed] for seed in own])


@dataclass(frozen=True)
class Comparison:
    rows: Sequence[str]  # the capability levels, named as the reference's tiers, strongest first
    columns: dict[str, dict[int, Place]]  # column → row number → what is there
    reference: Compared  # whose tiers are the rows

    @property
    def metric(self) -> Metric:
        return self.reference.metric

    @property
    def evaluated_on(self) -> str:
        return self.reference.first.config.evaluated_on

    def column(self, entry: Compared) -> str:
        return next(name for name, places in self.columns.items() if entry in (p.entry for p in places.values()))

    def best(self, row: int) -> Place | None:
        """Return what is better than each other in its row by more than the difference varies over the seeds."""
        places = [places[row] for places in self.columns.values() if row in places]
        for place in places:
            others = [other for other in places if other is not place]
            if others and all(self._better(place.minus(other)) for other in others):
                return place
        return None

    def _better(self, difference: Spread) -> bool:
        gain = difference.mean if self.metric.more_is_better else -difference.mean
        # with one seed nobody knows how much it varies
        return difference.deviation is not None and gain > difference.deviation


def arrange(entries: Sequence[Compared]) -> Comparison:
    """Put entries into a table: the one with the most tiers gives the rows, the others stand beside their rivals."""
    reference = max(entries, key=lambda entry: len(entry.tiers))
    sizes = [reference.first.costs[tier].parameters for tier in reference.tiers]
    columns: dict[str, dict[int, Place]] = {}
    for entry in entries:
        places = _places(entry, sizes)
        column = entry.first.config.method.column or entry.label
        if places.keys() & columns.get(column, {}).keys():
            column = entry.label
        columns.setdefault(column, {}).update(places)
    return Comparison(reference.tiers, columns, reference)


def _places(entry: Compared, sizes: Sequence[int]) -> dict[int, Place]:
    """Find rows by capability level where the entry has as many; otherwise by the nearest size, and a free one."""
    places: dict[int, Place] = {}
    for tier in entry.tiers:
        everybodys = len(entry.tiers) == 1 and len(set(entry.first.config.method.shares)) < 2
        shares = len(sizes) if everybodys else entry.levels.count(tier)
        shares = 1 if entry.first.config.federation.devices else shares  # levels have nothing to say then
        if len(entry.levels) == len(sizes):
            row = len(sizes) - 1 - entry.levels[::-1].index(tier)
        else:
            size = math.log(entry.first.costs[tier].parameters)
            free = [number for number in range(len(sizes)) if number not in places]
            row = min(free, key=lambda number: abs(math.log(sizes[number]) - size))
        places[row] = Place(entry, tier, shares)
    return places
