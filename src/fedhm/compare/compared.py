"""One entry of a comparison: the runs of one method with the same settings, one for each seed, and their statistics."""

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from fedhm.errors import FedhmError
from fedhm.runs.history import Run, read_runs
from fedhm.server.record import Record, Traffic


class Spread(NamedTuple):
    """Over the seeds."""

    mean: float
    deviation: float | None  # of the sample; None for one seed


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Compared:
    label: str
    runs: Sequence[Run]

    @property
    def first(self) -> Run:
        """What does not depend on the seed can be read off any run."""
        return self.runs[0]

    @property
    def tiers(self) -> list[str]:
        """Largest first."""
        return self.first.tiers

    @property
    def seeds(self) -> list[int]:
        return sorted(run.config.seed for run in self.runs)

    @cached_property
    def levels(self) -> list[str]:
        """The tier of each capability level, strongest first: one with two shares of the clients comes twice."""
        sizes = sorted(getattr(self.first.config.method, "tiers", ()), reverse=True)
        distinct = list(dict.fromkeys(sizes))
        if len(distinct) != len(self.tiers):
            return self.tiers
        return [self.tiers[distinct.index(size)] for size in sizes]

    def accuracy(self, tier: str) -> Spread:
        """After the last round, in percent."""
        return spread([100 * run.evaluated[-1].scores[tier].accuracy for run in self.runs])

    def curve(self, tier: str) -> list[tuple[int, Spread]]:
        """Round → accuracy in percent, at the rounds in which every run was evaluated."""
        scores = [{r.round: 100 * r.scores[tier].accuracy for r in run.evaluated} for run in self.runs]
        shared = sorted(set.intersection(*(set(of_run) for of_run in scores)))
        return [(number, spread([of_run[number] for of_run in scores])) for number in shared]

    def client_bytes(self, tier: str) -> float | None:
        """That training cost one participant of the tier in a round, both ways; None if it never had one."""
        known = [b for run in self.runs if (b := run.bytes_per_client(tier)) is not None]
        return statistics.fmean(known) if known else None

    def bytes(self, tier: str | None = None) -> float:
        """Of the whole training, by the tier's participants or by all of them; mean over the seeds."""
        return statistics.fmean(_total(run.records, sent, tier) for run in self.runs)

    def macs(self, tier: str | None = None) -> float:
        return statistics.fmean(_total(run.records, computed, tier) for run in self.runs)


def sent(traffic: Traffic) -> int:
    return traffic.down + traffic.up


def computed(traffic: Traffic) -> int:
    return traffic.macs


def so_far(run: Run, what: Callable[[Traffic], int]) -> list[int]:
    """What all clients together have sent, or computed, for training up to the end of each round."""
    return list(accumulate(_total([record], what) for record in run.records))


def _total(records: Sequence[Record], what: Callable[[Traffic], int], tier: str | None = None) -> int:
    return sum(what(traffic) for record in records for t, traffic in record.traffic.items() if tier in (None, t))


def existing(paths: Sequence[Path]) -> list[Compared]:
    """Runs with the same settings but the seed are one entry, called as their folders are."""
    folders = [folder for path in paths for folder in _run_folders(path)]
    if not folders:
        raise FedhmError("there are no runs to compare: name their folders, or one that holds them")
    groups: dict[str, list[Run]] = {}
    for run in read_runs(folders):
        groups.setdefault(_settings(run), []).append(run)
    labels = [re.sub(r"-seed\d+$", "", runs[0].name) for runs in groups.values()]
    return [
        Compared(runs[0].name if labels.count(label) > 1 else label, sorted(runs, key=lambda run: run.config.seed))
        for label, runs in zip(labels, groups.values(), strict=True)
    ]


def _run_folders(path: Path) -> Iterator[Path]:
    """`path` itself, or the runs in it. Files are what a glob brought along: tables and figures beside the runs."""
    if (path / "config.toml").exists():
        yield path
    elif path.is_dir():
        found = sorted(file.parent for file in path.glob("*/config.toml"))
        if not found:
            raise FedhmError(f"{path} is neither the folder of a run nor holds any")
        yield from found
    elif not path.exists():
        raise FedhmError(f"there is no folder {path}")


def _settings(run: Run) -> str:
    apart = ("seed", "data.folder", "engine.")
    return str([(key, value) for key, value in run.config.dotted().items() if not key.startswith(apart)])
