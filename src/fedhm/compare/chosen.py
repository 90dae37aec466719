"""What tuning came to: the validation results of all candidates, and each entry's best, kept in `tune.json`."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhm.compare.cells import Cell, changed_setting, point_name
from fedhm.compare.compared import Compared
from fedhm.compare.execute import Failed
from fedhm.compare.tuning import Tuning
from fedhm.config.sections.method_config import Settings
from fedhm.config.sections.objective import Metric
from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.machine.places import file_name
from fedhm.report.sheets import Sheet
from fedhm.runs.history import read_runs

TUNE_FILE = "tune.json"
DIVERGED = "diverged.txt"  # in the folder of a run that did, and why
ENOUGH = 3  # candidates, of which the first or last one may be best because the range ends there


@dataclass(frozen=True)
class Tried:
    """A candidate of an entry: its metric by tier after the last round, or why it has none."""

    point: Settings
    metrics: Mapping[str, float]
    failed: str = ""

    @property
    def mean(self) -> float | None:
        """Return the mean over the tiers; None if it has none."""
        return statistics.fmean(self.metrics.values()) if self.metrics else None


@dataclass(frozen=True)
class Tuned:
    """All candidates of all entries."""

    how: Mapping[str, Any]  # candidates by key, share held out, rounds and seed of the runs
    metric: Metric
    tried: Mapping[str, Sequence[Tried]]  # by entry

    @property
    def keys(self) -> list[str]:
        return list(self.how["candidates"])

    def chosen(self, label: str) -> Settings:
        """Return the settings of an entry's best candidate, of equal ones the first; nothing if it had none."""
        means = [tried.mean for tried in self.tried.get(label, ())]
        known = [mean for mean in means if mean is not None]
        return dict(self.tried[label][means.index(self.metric.best(known))].point) if known else {}

    def check(self) -> None:
        """Refuse an entry of which no candidate could be trained."""
        for label, of_entry in self.tried.items():
            if all(tried.mean is None for tried in of_entry):
                raise FedhmError(f"--tune: no candidate can be used for {label}, of the last one {of_entry[-1].failed}")

    @property
    def sheet(self) -> Sheet:
        """Return a row for each entry: what was chosen, and the validation metric of every candidate."""
        points = list(dict.fromkeys(point_name(tried.point) for of_entry in self.tried.values() for tried in of_entry))
        rows: list[list[str]] = []
        for label, of_entry in self.tried.items():
            shown = {point_name(tried.point): self._shown(tried) for tried in of_entry}
            rows.append([label, point_name(self.chosen(label)), *(shown.get(point, "") for point in points)])
        note = (
            f"Validation {self.metric.quoted}, mean over the tiers after round {self.how['rounds']}, with seed "
            f"{self.how['seed']}, on {100 * self.how['share']:g} % held out of every client's training samples."
        )
        if edges := [label for label in self.tried if self._at_an_edge(label)]:
            note += f" At the end of what was tried, so that more may lie beyond: {', '.join(edges)}."
        return Sheet(["entry", "chosen", *points], [rows], left=2, title="What was chosen", note=note)

    def _shown(self, tried: Tried) -> str:
        return "failed" if tried.mean is None else f"{self.metric.scaled(tried.mean):.{self.metric.decimals}f}"

    def _at_an_edge(self, label: str) -> bool:
        for key, value in self.chosen(label).items():
            values = self.how["candidates"][key]
            numbers = all(type(v) in (int, float) for v in values)
            if numbers and len(values) >= ENOUGH and value in (min(values), max(values)):
                return True
        return False

    def save(self, out: Path) -> Path:
        entries = {
            label: {
                "chosen": self.chosen(label),
                "tried": [
                    {"settings": t.point, self.metric.name: t.metrics, "mean": t.mean, "failed": t.failed}
                    for t in of_entry
                ],
            }
            for label, of_entry in self.tried.items()
        }
        write_atomically(
            out / TUNE_FILE, json.dumps({**self.how, "metric": self.metric.name, "entries": entries}, indent=2)
        )
        return out / TUNE_FILE


def diverged_before(runs: Sequence[Cell]) -> list[Failed]:
    """Return the runs that diverged when the same command ran last: they would again."""
    notes = ((cell, cell.folder / DIVERGED) for cell in runs)
    return [Failed(cell, note.read_text()) for cell, note in notes if note.exists() and not changed_setting(cell)]


def note_diverged(failures: Iterable[Failed]) -> None:
    for failed in failures:
        write_atomically(failed.cell.folder / DIVERGED, failed.reason)


def tuned_by(tuning: Tuning, runs: Sequence[Cell], failures: Iterable[Failed]) -> Tuned:
    """Read what the runs to choose by came to; those that diverged are there without a number."""
    why = {failed.cell.name: failed.reason for failed in failures}
    tried: dict[str, list[Tried]] = {}
    for cell in runs:
        metrics, failed = ({}, why[cell.name]) if cell.name in why else _last_metrics(cell)
        tried.setdefault(cell.entry.label, []).append(Tried(cell.entry.changes, metrics, failed))
    config = runs[0].config
    how = {"candidates": tuning.candidates, "share": tuning.share, "rounds": config.train.rounds, "seed": config.seed}
    return Tuned(how, config.objective.headline, tried)


def _last_metrics(cell: Cell) -> tuple[dict[str, float], str]:
    """Return the headline metric of every tier, or nothing and why."""
    (run,) = read_runs([cell.folder])
    headline = run.config.objective.headline.name
    metrics = {tier: metrics[headline] for tier, metrics in run.evaluated[-1].metrics.items()}
    if not all(map(math.isfinite, metrics.values())):
        return {}, f"its {headline} is no finite number after the last round"
    return metrics, ""


def tuned_alike(folders: Sequence[Path], entries: Sequence[Compared]) -> Tuned | None:
    """Read how runs that exist were tuned; None unless all of them were, in the same way."""
    metric, names = entries[0].metric, {file_name(entry.label) for entry in entries}
    found: list[Tuned] = []
    for out in dict.fromkeys(folder.resolve().parent for folder in folders):
        try:
            table = json.loads((out / TUNE_FILE).read_text())
            tried = {
                label: [Tried(t["settings"], t[table["metric"]], t["failed"]) for t in of_entry["tried"]]
                for label, of_entry in table.pop("entries").items()
                if file_name(label) in names
            }
            if table.pop("metric") != metric.name:
                return None
            found.append(Tuned(table, metric, tried))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FedhmError(f"cannot read {out / TUNE_FILE}: {error!r}") from None
    if any(one.how != found[0].how for one in found):
        return None
    return Tuned(found[0].how, metric, {label: tried for one in found for label, tried in one.tried.items()})
