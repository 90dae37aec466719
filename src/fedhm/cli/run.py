"""`fedhm run` starts an experiment, `fedhm resume` finishes one that was interrupted."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedhm.cli.options import Verbs, add_config, add_model, own_model, terminal, whole_number, whole_number_or_auto
from fedhm.cli.report import show_report
from fedhm.compare import is_comparison
from fedhm.errors import FedhmError
from fedhm.machine.process import MOST_PROCESSES

if TYPE_CHECKING:
    from rich.console import Console

    from fedhm.config.schema import Config


def add_run(verbs: Verbs) -> None:
    parser = verbs.add_parser("run", help="run an experiment", description="Run a preset or a config file.")
    add_config(parser)
    add_model(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: a new one below runs/)")
    parser.set_defaults(action=run, imports="fedhm.run")


def add_resume(verbs: Verbs) -> None:
    parser = verbs.add_parser("resume", help="resume a run that was interrupted")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--workers",
        type=whole_number_or_auto("--workers", MOST_PROCESSES),
        metavar="N",
        help="engine.workers from now on (default: as the run was started)",
    )
    parser.add_argument(
        "--from",
        dest="from_round",
        type=whole_number("--from"),
        metavar="ROUND",
        help="resume from the checkpoint of this round; results of later rounds are moved aside",
    )
    add_model(parser)
    parser.add_argument(
        "--rounds",
        type=whole_number("--rounds"),
        metavar="N",
        help="lengthen the run to this many rounds, even if it is finished",
    )
    parser.set_defaults(action=resume, imports="fedhm.run")


def run(options: argparse.Namespace) -> None:
    """Run a config. Errors in settings and data are found before the folder is made."""
    from fedhm.config.loading import load_config
    from fedhm.report.progress import progress
    from fedhm.run import prepare
    from fedhm.runs.folder import RunFolder, how_to_resume

    config = load_config(options.config, options.changes).resolved()
    own = own_model(options)
    config = config if own is None else config.without_model()
    path = options.out or _new_folder(Path(options.config).stem)
    RunFolder.check_free(path)
    if config.engine.name == "flower":
        _run_on_flower(options, config, path)
        return
    console = _announce_reading(config)
    with progress(console, config.objective.headline) as bar:
        experiment = prepare(config, [bar], model=own)
        with RunFolder.create(path, config) as folder:
            options.resume_hint = how_to_resume(path)
            try:
                experiment.run(folder)
            except FedhmError:
                folder.remove_if_no_round_done()
                if not path.exists():
                    options.resume_hint = ""
                raise
    show_report([path], path, console)


def resume(options: argparse.Namespace) -> None:
    from fedhm.report.progress import progress
    from fedhm.run import finish, lengthen
    from fedhm.runs.folder import RunFolder, how_to_resume, read_config

    if is_comparison(options.folder):
        from fedhm.compare.command import read_spec

        raise FedhmError(
            f"{options.folder} is the folder of a comparison, which the same command resumes: "
            f"{read_spec(options.folder).command}"
        )
    if options.rounds is not None:
        lengthen(options.folder, options.rounds)
    config = read_config(options.folder)
    if config.engine.name == "flower":
        with RunFolder.open(options.folder) as folder:  # fails while another process writes there
            if config.data is None and options.from_round is not None:  # only the app has the model and the data
                folder.rewind(options.from_round)
                print(f"the same 'flwr run' resumes {options.folder} from round {options.from_round}")
                return
        config = config if options.workers is None else config.with_workers(options.workers)
        _run_on_flower(options, config, options.folder, options.from_round)
        return
    console = _announce_reading(config)
    options.resume_hint = how_to_resume(options.folder)
    with progress(console, config.objective.headline) as bar:
        finish(options.folder, options.workers, options.from_round, [bar], model=own_model(options))
    show_report([options.folder], options.folder, console)


def _run_on_flower(options: argparse.Namespace, config: "Config", path: Path, from_round: int | None = None) -> None:
    """Let Flower's processes do the work and write the folder."""
    if options.model is not None:
        raise FedhmError("on Flower, a model of your own belongs into an app: see docs/flower.md")
    from fedhm.flower import run_on_flower
    from fedhm.report.progress import progress
    from fedhm.run import prepare
    from fedhm.runs.folder import RunFolder, how_to_resume

    console = _announce_reading(config)
    prepare(config)  # refuses wrong settings and data, before any round is moved aside
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
    show_report([path], path, console)


def _announce_reading(config: "Config") -> "Console":
    console = terminal()
    if config.data is not None:
        console.print(
            f"reading {config.data.source} … (device: {config.engine.device_names})", highlight=False, markup=False
        )
    return console


def _new_folder(name: str) -> Path:
    """Return runs/NAME, or the first of runs/NAME-2, -3, … that is free."""
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path
