"""What the verbs of the command line do."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from fedhm.assembly import named_design
from fedhm.cli.interrupts import ended_at_once
from fedhm.compare import is_comparison
from fedhm.config.loading import load_config
from fedhm.config.schema import Config
from fedhm.errors import FedhmError
from fedhm.machine.files import check_folder, make_folder
from fedhm.report import save_report
from fedhm.report.comparable import difference
from fedhm.report.progress import progress
from fedhm.report.tables import rich_tables, size_table
from fedhm.run import finish, prepare
from fedhm.runs.folder import RunFolder, how_to_resume, read_config
from fedhm.runs.history import read_runs


class Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Keep running when the reader of our output went away, as `head` does."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(options: argparse.Namespace) -> None:
    """Run a config; all that can be wrong with settings and data is found before a folder is made."""
    config = load_config(options.config, options.changes).resolved()
    path = options.out or _new_folder(Path(options.config).stem)
    RunFolder.check_free(path)
    if config.engine.name == "flower":
        _on_flower(options, config, path)
        return
    console = _reading(config)
    with progress(console, config.objective.headline) as bar:
        experiment = prepare(config, [bar])
        with RunFolder.create(path, config) as folder:
            options.resume_hint = how_to_resume(path)
            try:
                experiment.run(folder)
            except FedhmError:
                folder.remove_if_no_round_done()
                raise
    _show([path], path, console)


def resume(options: argparse.Namespace) -> None:
    if is_comparison(options.folder):
        from fedhm.compare.command import read_spec

        raise FedhmError(
            f"{options.folder} is the folder of a comparison, which the same command resumes: "
            f"{read_spec(options.folder).command}"
        )
    config = read_config(options.folder)
    if config.engine.name == "flower":
        with RunFolder.open(options.folder) as folder:  # which nobody else is writing
            if config.data is None and options.from_round is not None:  # only its app has what can be checked
                folder.rewind(options.from_round)
                print(f"the same 'flwr run' resumes {options.folder} from round {options.from_round}")
                return
        config = config if options.workers is None else config.with_workers(options.workers)
        _on_flower(options, config, options.folder, options.from_round)
        return
    console = _reading(config)
    options.resume_hint = how_to_resume(options.folder)
    with progress(console, config.objective.headline) as bar:
        finish(options.folder, options.workers, options.from_round, [bar])
    _show([options.folder], options.folder, console)


def _on_flower(options: argparse.Namespace, config: Config, path: Path, from_round: int | None = None) -> None:
    """Have Flower's processes do the work and write the folder."""
    from fedhm.flower import run_on_flower

    console = _reading(config)
    prepare(config)  # refuses what is wrong with settings and data, before any round is moved aside
    if from_round is not None:
        with RunFolder.open(path) as folder:
            folder.rewind(from_round)
    with progress(console, config.objective.headline) as bar:
        try:
            run_on_flower(config, path, bar, lambda sentence: console.print(sentence, highlight=False, markup=False))
        except KeyboardInterrupt:
            if (path / "config.toml").exists():
                options.resume_hint = how_to_resume(path)
            raise
    _show([path], path, console)


def _reading(config: Config) -> Console:
    console = Terminal()
    if config.data is not None:
        console.print(f"reading {config.data.source} …", highlight=False, markup=False)
    return console


def sizes(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.changes)
    design = named_design(config)
    Terminal().print(size_table(options.config, config, design.model, design.method, design.sample))


def report(options: argparse.Namespace) -> None:
    default = options.folders[0] if len(options.folders) == 1 else Path("report")
    if options.out:
        check_folder(options.out)
    if len(options.folders) == 1 and is_comparison(options.folders[0]):
        from fedhm.compare.command import rewrite_report

        rewrite_report(options, Terminal())
        return
    _show(options.folders, options.out or default, Terminal())


def watch(options: argparse.Namespace) -> None:
    """Serve the page of runs until Ctrl-C, which is how it is meant to end."""
    from fedhm.report.page import LivePages, PageServer

    for folder in options.folders:
        read_config(folder)  # says what is wrong with it; all else may still be to come
    console = Terminal()
    with PageServer(LivePages(options.folders), options.port) as server, suppress(KeyboardInterrupt):
        console.print(f"{server.address} shows how it goes; Ctrl-C ends this", highlight=False, soft_wrap=True)
        server.serve_forever()


def _show(folders: Sequence[Path], out: Path, console: Console) -> None:
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
    if found := difference(runs):
        console.print(f"Not comparable: {found}.", highlight=False, markup=False)
    for path in written:
        console.print(str(path), highlight=False, soft_wrap=True, markup=False)


def fit(options: argparse.Namespace) -> None:
    from fedhm.cli.devices.fit import fit

    fit(options, Terminal())


def plan(options: argparse.Namespace) -> None:
    from fedhm.cli.devices.plan import plan

    plan(options, Terminal())


def profile(options: argparse.Namespace) -> None:
    from fedhm.cli.devices.profile import profile

    profile(options, Terminal())


def compare(options: argparse.Namespace) -> None:
    from fedhm.compare.command import compare

    compare(options, Terminal())


def export(options: argparse.Namespace) -> None:
    from fedhm.export.command import export
    from fedhm.export.write import remove_unfinished

    out = options.out or options.folder / "export"
    with ended_at_once(lambda: remove_unfinished(out)):
        export(options, Terminal())


def flower_up(options: argparse.Namespace) -> None:
    from fedhm.flower import up

    up(options, Terminal())


def _new_folder(name: str) -> Path:
    """Return runs/NAME, or the first of runs/NAME-2, -3, … that is free."""
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path
