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


def verify(options: argparse.Namespace) -> None:
    from rich.table import Table
    from rich.text import Text

    from fedhm.machine.files import is_locked
    from fedhm.machine.printable import printable
    from fedhm.runs.folder import CONFIG_FILE, LOCK
    from fedhm.runs.verify import verify_run

    console, damaged, checked = terminal(), 0, 0
    for folder in options.folders:
        within = sorted(file.parent for file in folder.rglob(CONFIG_FILE))
        for path in within if within and not (folder / CONFIG_FILE).exists() else [folder]:
            table = Table("file", "state", "note", title=printable(str(path)), title_justify="left")
            for file in verify_run(path):
                checked += 1
                damaged += file.bad
                colour = "red" if file.bad else "green" if file.state == "intact" else "yellow"
                table.add_row(Text(printable(file.name)), Text(file.state, colour), Text(printable(file.note)))
            console.print(table)
            if is_locked(path / LOCK):
                console.print("a process is writing this run: files of its current round may seem to be missing")
    if damaged:
        raise FedhmError(f"{damaged} of {checked} files are damaged or missing")
    console.print(f"{checked} files checked, none is damaged")
