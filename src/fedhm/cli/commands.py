"""The command line: fedhm run · resume · compare · sizes · report · presets · flower up."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from fedhm.compare import command as comparing
from fedhm.config.reading import load_config, presets
from fedhm.config.settings import Config
from fedhm.errors import FedhmError
from fedhm.flower import up as flower_up
from fedhm.methods import make_method
from fedhm.methods.method import Setup
from fedhm.networks.probe import probe
from fedhm.report.comparable import difference
from fedhm.report.progress import progress
from fedhm.report.save import save_report
from fedhm.report.sizes import size_table
from fedhm.report.tables import rich_tables
from fedhm.run import build_model, input_format, prepare
from fedhm.runs.folder import RunFolder, read_config
from fedhm.runs.history import read_runs


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.command = shlex.join(["fedhm", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        options.verb(options)
    except FedhmError as error:
        print(f"fedhm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nfedhm: stopped{_where_to_go_on(options)}", file=sys.stderr)
        return 130
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"fedhm: {error}{_where_to_go_on(options)}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedhm",
        description="Federated learning for devices that are not alike: every client trains the largest "
        "low-rank version of one model that it can afford.",
    )
    parser.add_argument("--version", action="version", version=f"fedhm {version('fedhm')}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    run = verbs.add_parser("run", help="run an experiment", description="Run a preset or a config file.")
    _add_config(run)
    run.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: a new one below runs/)")
    run.set_defaults(verb=_run)

    resume = verbs.add_parser("resume", help="go on with a run that was interrupted")
    resume.add_argument("folder", type=Path, metavar="DIR")
    resume.add_argument("--workers", metavar="N", help="engine.workers from now on (default: as the run was started)")
    resume.set_defaults(verb=_resume)

    compare = verbs.add_parser(
        "compare", help="run several methods and put them into one table", description=comparing.DESCRIPTION
    )
    _add_config(compare, default=None)
    comparing.add_arguments(compare)
    compare.set_defaults(verb=lambda options: comparing.compare(options, _Console()))

    sizes = verbs.add_parser("sizes", help="what each tier costs: parameters, MACs, bytes, training memory")
    _add_config(sizes)
    sizes.set_defaults(verb=_sizes)

    report = verbs.add_parser("report", help="tables and plots of one or several runs")
    report.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    report.add_argument("--out", type=Path, metavar="DIR", help="where to (default: the run's folder, or ./report)")
    report.set_defaults(verb=_report)

    listing = verbs.add_parser("presets", help="list the presets")
    listing.set_defaults(verb=_presets)

    flower = verbs.add_parser(
        "flower", help="a Flower federation on this machine", description="Flower, to try it out."
    )
    flower_verbs = flower.add_subparsers(required=True, metavar="VERB")
    up = flower_verbs.add_parser("up", help="start a SuperLink and SuperNodes", description=flower_up.DESCRIPTION)
    flower_up.add_arguments(up)
    up.set_defaults(verb=lambda options: flower_up.up(options, _Console()))
    return parser


def _add_config(parser: argparse.ArgumentParser, default: str | None = "digits") -> None:
    hint = f"default: {default}" if default else "see 'fedhm presets'"
    parser.add_argument("config", nargs="?", default=default, metavar="PRESET or file.toml", help=hint)
    parser.add_argument(
        "--set",
        dest="changes",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="change settings, such as train.lr=0.05",
    )


def _run(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.changes).resolved()
    path = options.out or _new_folder(Path(options.config).stem)
    RunFolder.check_free(path)
    if config.engine.name == "flower":
        _execute_on_flower(options, config, path)
    else:
        _execute(options, config, lambda: RunFolder.create(path, config))


def _resume(options: argparse.Namespace) -> None:
    config = read_config(options.folder)
    if options.workers is not None:
        config = config.with_workers(_workers(options.workers))
    if config.engine.name == "flower":
        with RunFolder.open(options.folder):  # which nobody else is writing
            pass
        _execute_on_flower(options, config, options.folder)
    else:
        _execute(options, config, lambda: RunFolder.open(options.folder))


def _workers(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise FedhmError(f"--workers takes a whole number from 1 on, or auto, not '{text}'")
    return int(text)


def _execute(options: argparse.Namespace, config: Config, open_folder: Callable[[], RunFolder]) -> None:
    """Everything that can be wrong with settings and data is found before a folder is made."""
    console = _Console()
    if config.data is not None:
        console.print(f"reading {config.data.source} …", highlight=False)
    with progress(console) as bar:
        experiment = prepare(config, [bar])
        with open_folder() as folder:
            options.go_on = f"; 'fedhm resume {folder.path}' goes on from the last complete round"
            try:
                experiment.run(folder)
            except FedhmError:
                folder.remove_if_nothing_was_done()
                raise
    _show([folder.path], folder.path, console)


def _execute_on_flower(options: argparse.Namespace, config: Config, path: Path) -> None:
    """The same, where Flower's processes do the work and write the folder."""
    from fedhm.flower.follow import run_on_flower

    console = _Console()
    if config.data is not None:
        console.print(f"reading {config.data.source} …", highlight=False)
    prepare(config)
    with progress(console) as bar:
        try:
            run_on_flower(config, path, bar, lambda sentence: console.print(sentence, highlight=False, markup=False))
        except KeyboardInterrupt:
            if (path / "config.toml").exists():
                options.go_on = f"; 'fedhm resume {path}' goes on from the last complete round"
            raise
    _show([path], path, console)


def _sizes(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.changes)
    shape, classes = input_format(config)
    model, sample = build_model(config, shape, classes), torch.zeros(1, *shape)
    method = make_method(model, config.method, Setup(probe(model, sample, classes), sample))
    _Console().print(size_table(options.config, config, model, method, shape))


def _report(options: argparse.Namespace) -> None:
    default = options.folders[0] if len(options.folders) == 1 else Path("report")
    _show(options.folders, options.out or default, _Console())


def _show(folders: Sequence[Path], out: Path, console: Console) -> None:
    runs = read_runs(folders)
    for run in runs:
        if not run.evaluated:
            print(f"fedhm: {run.name} has no evaluated round yet", file=sys.stderr)
    runs = [run for run in runs if run.evaluated]
    if not runs:
        raise FedhmError("there is nothing to report")
    written = save_report(runs, out)
    for table in rich_tables(runs, console.width):
        console.print(table)
    if found := difference(runs):
        console.print(f"Not comparable: {found}.", highlight=False)
    for path in written:
        console.print(str(path), highlight=False, soft_wrap=True)


def _presets(_: argparse.Namespace) -> None:
    for name, text in presets().items():
        print(f"{name:24}{text.splitlines()[0].removeprefix('# ')}")


def _new_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, -3, … that is free."""
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path


def _where_to_go_on(options: argparse.Namespace) -> str:
    said: str = getattr(options, "go_on", "")
    return said


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader of our output went away, as `head` does: the run goes on without it."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
