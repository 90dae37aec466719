"""A comparison that lies on disk, reported once more: `comparison.json` in its folder says what it is made of."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from fedhm.compare import STATED
from fedhm.compare.chosen import tuned_alike
from fedhm.compare.compared import Compared, existing, run_folders
from fedhm.compare.pages.report import ComparisonReport
from fedhm.compare.reference import layers_of
from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.runs.folder import is_complete, read_config
from fedhm.runs.history import read_runs


@dataclass(frozen=True)
class Stated:
    """What was compared. Folders are named as seen from that of the comparison."""

    command: str
    target: float | None = None
    entries: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the runs of each
    runs: Sequence[str] = ()  # in place of entries: runs that existed before

    def save(self, out: Path) -> None:
        write_atomically(out / STATED, json.dumps(asdict(self), indent=2) + "\n")


def from_there(paths: Sequence[Path], out: Path) -> list[str]:
    """Return paths as they are seen from a comparison's folder."""
    return [os.path.relpath(path, out) for path in paths]


def read_stated(folder: Path) -> Stated:
    """Read what a comparison was made of; one from before that was written is made of all runs in its folder."""
    file = folder / STATED
    if not file.exists():
        return Stated(f"fedhm compare --runs {folder}", runs=["."])
    try:
        return TypeAdapter(Stated).validate_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise FedhmError(f"cannot read {file}: {error}; the comparison's own command writes it again") from None


def reported_again(folder: Path) -> ComparisonReport:
    """Return the report on what a comparison's folder holds: on all entries whose runs are complete."""
    stated = read_stated(folder)
    folders = {label: [folder / name for name in names] for label, names in stated.entries.items()}
    found = [Compared(label, read_runs(own)) for label, own in folders.items() if all(map(_complete, own))]
    paths = [path for own in folders.values() for path in own] or run_folders([folder / name for name in stated.runs])
    if stated.runs:
        found = existing(paths)
    if not found:
        raise FedhmError(f"none of the comparison in {folder} is complete: {stated.command} resumes it")
    tuned = tuned_alike(paths, found)
    return ComparisonReport(found, stated.command, layers_of(found), stated.target, tuned)


def _complete(folder: Path) -> bool:
    return (folder / "config.toml").exists() and is_complete(folder, read_config(folder))
