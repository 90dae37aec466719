"""`fedhm verify` checks that the files of runs are as they were written."""

import argparse
from pathlib import Path

from fedhm.cli.options import Verbs, terminal
from fedhm.errors import FedhmError


def add_verify(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "verify",
        help="check every file of a run's folder: settings, records, checkpoints, models, report",
        description="Check that every file of a run's folder is as the run wrote it, and that all belong to one run. "
        "Of a folder with several runs, such as a comparison's, all are checked. Exit code 1: something is damaged.",
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    parser.set_defaults(action=verify, imports="fedhm.runs.verify")


def _holds_run(path: Path) -> bool:
    """Tell whether a folder holds a run, or what is left of one. Rounds that were moved aside belong to another."""
    from fedhm.runs.folder import CONFIG_FILE, DATA_FILE, RECORDS_FILE

    left = any((path / name).is_file() for name in (CONFIG_FILE, DATA_FILE, RECORDS_FILE))
    return left and not path.name.startswith("taken-back-")


def _is_going_on(path: Path) -> bool:
    from fedhm.machine.files import is_locked
    from fedhm.runs.folder import LOCK

    try:  # nothing is written: the folder may be a copy on a medium that cannot be
        return (path / LOCK).is_file() and is_locked(path / LOCK)
    except OSError:
        return False


def verify(options: argparse.Namespace) -> None:
    from rich.table import Table
    from rich.text import Text

    from fedhm.machine.printable import printable
    from fedhm.runs.verify import verify_run

    console, damaged, checked = terminal(), 0, 0
    for folder in options.folders:
        within = [] if _holds_run(folder) else sorted(path for path in folder.rglob("*") if _holds_run(path))
        for path in within or [folder]:
            table = Table("file", "state", "note", title=printable(str(path)), title_justify="left")
            for file in verify_run(path):
                checked += 1
                damaged += file.bad
                colour = "red" if file.bad else "green" if file.state == "intact" else "yellow"
                table.add_row(Text(printable(file.name)), Text(file.state, colour), Text(printable(file.note)))
            console.print(table)
            if _is_going_on(path):
                console.print("a process is writing this run: files of its current round may seem to be missing")
    if damaged:
        raise FedhmError(f"{damaged} of {checked} files are damaged or missing")
    console.print(f"{checked} files checked, none is damaged")
