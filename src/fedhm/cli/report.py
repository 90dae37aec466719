"""`fedhm report` and `fedhm watch` show runs, `fedhm sizes` shows what tiers cost."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedhm.cli.options import Verbs, add_config, terminal, whole_number
from fedhm.compare import is_comparison
from fedhm.errors import FedhmError

if TYPE_CHECKING:
    from rich.console import Console


def add_report(verbs: Verbs) -> None:
    parser = verbs.add_parser("report", help="a page, tables and plots of one or several runs")
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to (default: the run's folder, or ./report)")
    parser.set_defaults(action=report, imports="fedhm.report.tables")


def report(options: argparse.Namespace) -> None:
    from fedhm.machine.files import check_folder

    if options.out:
        check_folder(options.out)
    if len(options.folders) == 1 and is_comparison(options.folders[0]):
        from fedhm.compare.command import rewrite_report

        rewrite_report(options, terminal())
        return
    default = options.folders[0] if len(options.folders) == 1 else Path("report")
    show_report(_runs_among(options.folders), options.out or default, terminal())


def _runs_among(folders: Sequence[Path]) -> Sequence[Path]:
    """Return the folders of runs: `runs/*` also names comparisons, which have a page of their own, and other files."""
    from fedhm.machine.printable import quoted_command
    from fedhm.runs.folder import CONFIG_FILE

    if len(folders) == 1:
        return folders  # the one that the user means: reading it says what it is not
    runs = []
    for folder in folders:
        if is_comparison(folder):
            own = quoted_command("fedhm", "report", folder)
            print(f"fedhm: {folder} is left out: it is a comparison, which {own} shows", file=sys.stderr)
        elif folder.exists() and not (folder / CONFIG_FILE).exists():
            print(f"fedhm: {folder} is left out: it is not the folder of a run", file=sys.stderr)
        else:
            runs.append(folder)
    if not runs:
        raise FedhmError("there is no run among these folders")
    return runs


def show_report(folders: Sequence[Path], out: Path, console: "Console") -> None:
    """Write the report of runs to a folder, and print its tables and the paths of its files."""
    from fedhm.machine.files import make_folder
    from fedhm.report import save_report
    from fedhm.report.comparable import find_difference
    from fedhm.report.tables import rich_tables
    from fedhm.runs.history import read_runs

    runs = read_runs(folders)
    for run in runs:
        if not run.evaluated:
            print(f"fedhm: {run.name} has no evaluated round yet", file=sys.stderr)
    runs = [run for run in runs if run.evaluated]
    if not runs:
        raise FedhmError("there is nothing to report")
    make_folder(out)
    written = save_report(runs, out)
    for table in rich_tables(runs, console.width):
        console.print(table)
    if found := find_difference(runs):
        console.print(f"Not comparable: {found}.", highlight=False, markup=False)
    for path in written:
        console.print(str(path), highlight=False, soft_wrap=True, markup=False)


def add_watch(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "watch",
        help="the page of a run that is going on, in a browser of this machine",
        description="Serve the page of one or several runs on this machine alone; it renews itself.",
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    parser.add_argument(
        "--port",
        type=whole_number("--port", 65535),
        default=0,
        metavar="N",
        help="which port to listen on (default: a free one)",
    )
    parser.set_defaults(action=watch, imports="fedhm.report.tables")


def watch(options: argparse.Namespace) -> None:
    """Serve the page of runs until Ctrl-C."""
    from fedhm.report.page import LivePages, PageServer
    from fedhm.runs.folder import read_config

    folders = _runs_among(options.folders)
    for folder in folders:
        read_config(folder)  # refuses a folder of something else; records may still be missing
    console = terminal()
    with PageServer(LivePages(folders), options.port) as server, suppress(KeyboardInterrupt):
        console.print(f"{server.address} shows how it goes; Ctrl-C ends this", highlight=False, soft_wrap=True)
        server.serve_forever()


def add_sizes(verbs: Verbs) -> None:
    parser = verbs.add_parser("sizes", help="what each tier costs: parameters, MACs, bytes, training memory")
    add_config(parser)
    parser.set_defaults(action=sizes, imports="fedhm.run")


def sizes(options: argparse.Namespace) -> None:
    from fedhm.assembly import named_design
    from fedhm.config.loading import load_config
    from fedhm.report.tables import size_table

    config = load_config(options.config, options.changes)
    design = named_design(config)
    terminal().print(size_table(options.config, config, design.model, design.method, design.sample))
