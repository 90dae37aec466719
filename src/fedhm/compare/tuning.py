"""`--tune`: every entry gets the best of several candidate settings before its seeds run.

Tuning runs are ordinary runs with the first seed. They are evaluated on samples held out of the training data.
"""

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedhm.compare import TUNE_SHARE
from fedhm.compare.execute import (
    Cell,
    Failed,
    all_cells,
    changed_setting,
    check,
    check_buildable,
    check_folder,
    config_of,
    plan_cells,
    settings_text,
)
from fedhm.compare.results import EntryRuns
from fedhm.compare.select import Entry
from fedhm.config.loading import read_value
from fedhm.config.method import Settings
from fedhm.config.objective import Metric
from fedhm.config.schema import Config
from fedhm.errors import FedhmError
from fedhm.machine.files import file_name, read_regular, write_atomically
from fedhm.report.sheets import Sheet
from fedhm.runs.history import read_runs

FOLDER = "tune"  # of the tuning runs, in the comparison's
TUNABLE = ("train", "server", "method")  # sections; data, clients and model are the same for all entries
SHARED = ("train.rounds", "method.name", "method.tiers")  # the same for all entries, too
USAGE = "--tune takes KEY=A,B,…, such as train.lr=0.02,0.05,0.1"


@dataclass(frozen=True)
class Tuning:
    """The options of `--tune`."""

    candidates: dict[str, list[Any]]  # by dotted key
    share: float = TUNE_SHARE
    rounds: int | None = None  # of the tuning runs; None: as many as the other runs have

    def variants(self, entry: Entry, config: Config) -> list[Entry]:
        """Return the entry with every combination of the candidates, for the keys that its method has."""
        table = config.model_dump(mode="json", exclude={"compare"})
        own = config_of(table, entry, config.seed)
        keys = [key for key in self.candidates if _has(own, key)]
        points = (dict(zip(keys, values, strict=True)) for values in product(*(self.candidates[key] for key in keys)))
        return [replace(entry, changes=point) for point in points]

    def cells(self, config: Config, entries: Sequence[Entry], out: Path, jobs: int) -> list[Cell]:
        """Return the tuning runs; none for an entry without a key to tune."""
        short = self._shortened(config)
        variants = [variant for entry in entries for variant in self.variants(entry, short) if variant.changes]
        return plan_cells(short, [(variant, short.seed, _name(variant)) for variant in variants], out, jobs)

    def check(self, config: Config, entries: Sequence[Entry], seeds: int, out: Path, tuning_runs: list[Cell]) -> None:
        """Find errors before anything runs, for every possible choice."""
        variants = [self.variants(entry, config) for entry in entries]
        self._check_keys(config, entries)
        folders: dict[Path, list[Cell]] = {}
        for cell in all_cells(config, [variant for of_entry in variants for variant in of_entry], seeds, out, 1):
            folders.setdefault(cell.folder, []).append(cell)
        for possible in folders.values():
            _check_one_fits(possible)
        names = [cell.name for cell in tuning_runs]
        if len(set(names)) < len(names):
            raise FedhmError("--tune: two candidates have the same name as folders")
        check(tuning_runs)
        check_buildable([possible[0] for possible in folders.values()])

    def _shortened(self, config: Config) -> Config:
        """Return the settings of the tuning runs. With fewer rounds, milestones come earlier, too."""
        if config.data is None:
            raise FedhmError("--tune holds samples out of the data that a config names: there is no [data] section")
        if config.data.validation:
            raise FedhmError(
                "--tune holds out samples itself, and the comparison needs the test set: remove data.validation, and "
                "choose the share with --tune-share"
            )
        train = config.train
        rounds = self.rounds or train.rounds
        milestones = tuple(max(1, round(m * rounds / train.rounds)) for m in train.milestones)
        shorter = {"rounds": rounds, "milestones": milestones} if rounds != train.rounds else {}
        data = config.data.model_copy(update={"validation": self.share})
        return config.model_copy(update={"data": data, "train": train.model_copy(update=shorter)})

    def _check_keys(self, config: Config, entries: Sequence[Entry]) -> None:
        table = config.model_dump(mode="json", exclude={"compare"})
        for key, values in self.candidates.items():
            if not any(_has(config_of(table, entry, config.seed), key) for entry in entries):
                config_of(
                    table, replace(entries[0], changes={key: values[0]}), config.seed
                )  # raises an error for an unknown key
                raise FedhmError(f"--tune {key}: none of the entries has such a setting")


def read_tuning(options: Sequence[str], share: float | None, rounds: int | None) -> Tuning:
    """Read all options KEY=A,B,…. Several keys make a grid."""
    candidates: dict[str, list[Any]] = {}
    for option in options:
        key, _, text = (part.strip() for part in option.partition("="))
        if not key or not text:
            raise FedhmError(f"{USAGE}, not '{option}'")
        section, dot, _ = key.partition(".")
        if section in Config.model_fields and (section not in TUNABLE or not dot or key in SHARED):
            raise FedhmError(
                f"--tune {key}: all entries share this setting; tune settings of "
                f"{', '.join(f'[{name}]' for name in TUNABLE)} other than {', '.join(SHARED)}"
            )
        if key in candidates:
            raise FedhmError(f"--tune {key} is given twice: put all its candidates into one")
        candidates[key] = _values(option, text)
    return Tuning(candidates, TUNE_SHARE if share is None else share, rounds)


def _values(option: str, text: str) -> list[Any]:
    values: list[Any] = []
    for part in _split_at_commas(text):
        if not part:
            raise FedhmError(f"{USAGE}, not '{option}'")
        value = read_value(part)
        if value not in values:
            values.append(value)
    if len(values) < 2:
        raise FedhmError(f"--tune {option} leaves nothing to choose: name several candidates, or use --set")
    return values


def _split_at_commas(text: str) -> Iterator[str]:
    """Yield the texts between commas. Commas in lists and quotes do not count."""
    depth, quote, start = 0, "", 0
    for place, letter in enumerate(text):
        if quote or letter in "\"'":
            quote = ("" if letter == quote else quote) if quote else letter
        elif letter == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
        else:
            depth += (letter in "[{") - (letter in "]}")
    yield text[start:].strip()


def _has(config: Config, key: str) -> bool:
    section, _, name = key.partition(".")
    return section in TUNABLE and name in type(getattr(config, section)).model_fields


def _name(variant: Entry) -> str:
    return f"{FOLDER}/{file_name(variant.label)}/{_folder_name(variant.changes)}"


def _folder_name(point: Settings) -> str:
    return file_name(settings_text(point)).replace(" ", "")


def _check_one_fits(possible: Sequence[Cell]) -> None:
    """Accept a folder that fits any of the candidates, since the best is not known yet."""
    refused: FedhmError | None = None
    for cell in possible:
        try:
            return check_folder(cell)
        except FedhmError as error:
            refused = refused or error
    if refused:
        raise refused
    return None


# The results of tuning, kept in `tune.json`: the validation metrics of all candidates, and each entry's best.

TUNE_FILE = "tune.json"
DIVERGED = "diverged.txt"  # the reason, in the folder of a run that diverged
ENOUGH = 3  # with so many candidates, a best one at the end of the range suggests that better ones lie beyond


@dataclass(frozen=True)
class Candidate:
    """A candidate of an entry: its metric by tier after the last round, or the reason why it failed."""

    point: Settings
    metrics: Mapping[str, float]
    failed: str = ""

    @property
    def mean(self) -> float | None:
        """Return the mean over the tiers; None if the candidate failed."""
        return statistics.fmean(self.metrics.values()) if self.metrics else None


@dataclass(frozen=True)
class TuningSetup:
    """How the tuning runs were made: entries are comparable if theirs were made in the same way."""

    candidates: Mapping[str, Sequence[Any]]  # by dotted key
    share: float  # of the training samples, held out
    rounds: int
    seed: int


@dataclass(frozen=True)
class TuningResult:
    """All candidates of all entries."""

    setup: TuningSetup
    metric: Metric
    tried: Mapping[str, Sequence[Candidate]]  # by entry

    @property
    def keys(self) -> list[str]:
        return list(self.setup.candidates)

    def best_settings(self, label: str) -> Settings:
        """Return the settings of an entry's best candidate, the first of equal ones; none if it has no candidate."""
        means = [tried.mean for tried in self.tried.get(label, ())]
        known = [mean for mean in means if mean is not None]
        return dict(self.tried[label][means.index(self.metric.best(known))].point) if known else {}

    def check(self) -> None:
        """Refuse an entry whose candidates all failed."""
        for label, of_entry in self.tried.items():
            if all(tried.mean is None for tried in of_entry):
                raise FedhmError(f"--tune: all candidates failed for {label}; the last one: {of_entry[-1].failed}")

    @property
    def sheet(self) -> Sheet:
        """Return a row for each entry: its best settings, and the validation metric of every candidate."""
        points = list(
            dict.fromkeys(settings_text(tried.point) for of_entry in self.tried.values() for tried in of_entry)
        )
        rows: list[list[str]] = []
        for label, of_entry in self.tried.items():
            shown = {settings_text(tried.point): self._shown(tried) for tried in of_entry}
            rows.append([label, settings_text(self.best_settings(label)), *(shown.get(point, "") for point in points)])
        note = (
            f"Validation {self.metric.quoted}, mean over the tiers after round {self.setup.rounds}, with seed "
            f"{self.setup.seed}, on {100 * self.setup.share:g} % held out of every client's training samples."
        )
        if edges := [label for label in self.tried if self._at_an_edge(label)]:
            note += (
                f" The best is at the end of the candidates, so better values may lie beyond, for: {', '.join(edges)}."
            )
        return Sheet(["entry", "chosen", *points], [rows], left=2, title="What was chosen", note=note)

    def _shown(self, tried: Candidate) -> str:
        return "failed" if tried.mean is None else f"{self.metric.scaled(tried.mean):.{self.metric.decimals}f}"

    def _at_an_edge(self, label: str) -> bool:
        for key, value in self.best_settings(label).items():
            values = self.setup.candidates[key]
            numbers = all(type(v) in (int, float) for v in values)
            if numbers and len(values) >= ENOUGH and value in (min(values), max(values)):
                return True
        return False

    def save(self, out: Path) -> Path:
        entries = {
            label: {
                "chosen": self.best_settings(label),
                "tried": [
                    {"settings": t.point, self.metric.name: t.metrics, "mean": t.mean, "failed": t.failed}
                    for t in of_entry
                ],
            }
            for label, of_entry in self.tried.items()
        }
        write_atomically(
            out / TUNE_FILE,
            json.dumps({**asdict(self.setup), "metric": self.metric.name, "entries": entries}, indent=2),
        )
        return out / TUNE_FILE


def previously_diverged(runs: Sequence[Cell]) -> list[Failed]:
    """Return the runs that diverged when the same command ran before. They would diverge again."""
    notes = ((cell, cell.folder / DIVERGED) for cell in runs)
    return [
        Failed(cell, read_regular(note).decode()) for cell, note in notes if note.exists() and not changed_setting(cell)
    ]


def mark_diverged(failures: Iterable[Failed]) -> None:
    for failed in failures:
        write_atomically(failed.cell.folder / DIVERGED, failed.reason)


def collect_tuning(tuning: Tuning, runs: Sequence[Cell], failures: Iterable[Failed]) -> TuningResult:
    """Read the results of the tuning runs. Runs that diverged have no number."""
    why = {failed.cell.name: failed.reason for failed in failures}
    tried: dict[str, list[Candidate]] = {}
    for cell in runs:
        metrics, failed = ({}, why[cell.name]) if cell.name in why else _last_metrics(cell)
        tried.setdefault(cell.entry.label, []).append(Candidate(cell.entry.changes, metrics, failed))
    config = runs[0].config
    setup = TuningSetup(tuning.candidates, tuning.share, config.train.rounds, config.seed)
    return TuningResult(setup, config.objective.headline, tried)


def _last_metrics(cell: Cell) -> tuple[dict[str, float], str]:
    """Return the headline metric of every tier, or nothing and the reason."""
    (run,) = read_runs([cell.folder])
    headline = run.config.objective.headline.name
    metrics = {tier: metrics[headline] for tier, metrics in run.evaluated[-1].metrics.items()}
    if not all(map(math.isfinite, metrics.values())):
        return {}, f"its {headline} is no finite number after the last round"
    return metrics, ""


def shared_tuning(folders: Sequence[Path], entries: Sequence[EntryRuns]) -> TuningResult | None:
    """Read how existing runs were tuned; None unless all of them were tuned in the same way."""
    metric, names = entries[0].metric, {file_name(entry.label) for entry in entries}
    found: list[TuningResult] = []
    for out in dict.fromkeys(folder.resolve().parent for folder in folders):
        try:
            table = json.loads(read_regular(out / TUNE_FILE))
            tried = {
                label: [Candidate(t["settings"], t[table["metric"]], t["failed"]) for t in of_entry["tried"]]
                for label, of_entry in table.pop("entries").items()
                if file_name(label) in names
            }
            if table.pop("metric") != metric.name:
                return None
            found.append(TuningResult(TuningSetup(**table), metric, tried))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FedhmError(f"cannot read {out / TUNE_FILE}: {error!r}") from None
    if any(one.setup != found[0].setup for one in found):
        return None
    return TuningResult(found[0].setup, metric, {label: tried for one in found for label, tried in one.tried.items()})
