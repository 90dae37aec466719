"""What `--tune` asks for: candidates for settings, of which every entry gets its own best before the seeds run.

The runs to choose by are ordinary ones with the first seed, evaluated on samples held out of the training data.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedhm.compare import TUNE_SHARE
from fedhm.compare.cells import Cell, cells, check, check_folder, check_parts, config_of, plan, point_name
from fedhm.compare.entries import Entry
from fedhm.config.reading import read_value
from fedhm.config.sections.method_config import Settings
from fedhm.config.settings import Config
from fedhm.errors import FedhmError
from fedhm.machine.places import file_name

FOLDER = "tune"  # of the runs to choose by, in the comparison's
TUNABLE = ("train", "server", "method")  # how an entry trains is its own; data, clients and model are everybody's
SHARED = ("train.rounds", "method.name", "method.tiers")  # but these are what is compared
USAGE = "--tune takes KEY=A,B,…, such as train.lr=0.02,0.05,0.1"


@dataclass(frozen=True)
class Tuning:
    candidates: dict[str, list[Any]]  # by dotted key
    share: float = TUNE_SHARE
    rounds: int | None = None  # of the runs to choose by; None: as many as the others have

    def variants(self, entry: Entry, config: Config) -> list[Entry]:
        """Return the entry with every combination of the candidates for those keys that it has."""
        table = config.model_dump(mode="json", exclude={"compare"})
        own = config_of(table, entry, config.seed)
        keys = [key for key in self.candidates if _has(own, key)]
        points = (dict(zip(keys, values, strict=True)) for values in product(*(self.candidates[key] for key in keys)))
        return [replace(entry, changes=point) for point in points]

    def cells(self, config: Config, entries: Sequence[Entry], out: Path, jobs: int) -> list[Cell]:
        """Return the runs to choose by; none of an entry that has nothing to choose."""
        short = self._shortened(config)
        variants = [variant for entry in entries for variant in self.variants(entry, short) if variant.changes]
        return plan(short, [(variant, short.seed, _name(variant)) for variant in variants], out, jobs)

    def check(self, config: Config, entries: Sequence[Entry], seeds: int, out: Path, to_choose_by: list[Cell]) -> None:
        """Find what is wrong before anything runs, whatever will be chosen."""
        variants = [self.variants(entry, config) for entry in entries]
        self._check_keys(config, entries)
        folders: dict[Path, list[Cell]] = {}
        for cell in cells(config, [variant for of_entry in variants for variant in of_entry], seeds, out, 1):
            folders.setdefault(cell.folder, []).append(cell)
        for possible in folders.values():
            _check_one_fits(possible)
        names = [cell.name for cell in to_choose_by]
        if len(set(names)) < len(names):
            raise FedhmError("--tune: two candidates have the same name as folders")
        check(to_choose_by)
        check_parts([possible[0] for possible in folders.values()])

    def _shortened(self, config: Config) -> Config:
        """Return the settings of the runs to choose by; where they have fewer rounds, milestones come earlier, too."""
        if config.data is None:
            raise FedhmError("--tune holds samples out of the data that a config names: there is no [data] section")
        if config.data.validation:
            raise FedhmError(
                "data.validation leaves the runs that are compared no test set, which --tune does not touch: "
                "leave it out, and say with --tune-share how much to hold out"
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
                config_of(table, replace(entries[0], changes={key: values[0]}), config.seed)  # says what is wrong
                raise FedhmError(f"--tune {key}: none of the entries has such a setting")


def read_tuning(options: Sequence[str], share: float | None, rounds: int | None) -> Tuning:
    """Read KEY=A,B,… as often as it was given; several keys make a grid."""
    candidates: dict[str, list[Any]] = {}
    for option in options:
        key, _, text = (part.strip() for part in option.partition("="))
        if not key or not text:
            raise FedhmError(f"{USAGE}, not '{option}'")
        section, dot, _ = key.partition(".")
        if section in Config.model_fields and (section not in TUNABLE or not dot or key in SHARED):
            raise FedhmError(
                f"--tune {key}: entries are compared with the same one; what may be tuned are settings of "
                f"{', '.join(f'[{name}]' for name in TUNABLE)} other than {', '.join(SHARED)}"
            )
        if key in candidates:
            raise FedhmError(f"--tune {key} is given twice: put all its candidates into one")
        candidates[key] = _values(option, text)
    return Tuning(candidates, TUNE_SHARE if share is None else share, rounds)


def _values(option: str, text: str) -> list[Any]:
    values: list[Any] = []
    for part in _parts(text):
        if not part:
            raise FedhmError(f"{USAGE}, not '{option}'")
        value = read_value(part)
        if value not in values:
            values.append(value)
    if len(values) < 2:
        raise FedhmError(f"--tune {option} leaves nothing to choose: name several candidates, or use --set")
    return values


def _parts(text: str) -> Iterator[str]:
    """Yield what stands between commas, but for those in a list or in quotes."""
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
    return f"{FOLDER}/{file_name(variant.label)}/{_place(variant.changes)}"


def _place(point: Settings) -> str:
    return file_name(point_name(point)).replace(" ", "")


def _check_one_fits(possible: Sequence[Cell]) -> None:
    """Accept a run that was made with any of the candidates: which one is chosen is not known yet."""
    refused: FedhmError | None = None
    for cell in possible:
        try:
            return check_folder(cell)
        except FedhmError as error:
            refused = refused or error
    if refused:
        raise refused
    return None
