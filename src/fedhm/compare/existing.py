"""The entries of runs that exist already, wherever they are."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedhm.errors import FedhmError
from fedhm.report.compared import Compared
from fedhm.report.runs import Run, read_runs


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
