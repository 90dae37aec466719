"""What can be written on the command line: every verb with its options, and where the function is that does it."""

import argparse
from pathlib import Path
from typing import Any

from fedhm.cli import compare_arguments, device_arguments, export_arguments, flower_arguments
from fedhm.cli.options import whole_number, whole_number_or_auto
from fedhm.machine.process import MOST_PROCESSES


def make_parser() -> argparse.ArgumentParser:
    """Return what reads a command line into options; `verb` among them says where the function is that does it."""
    parser = argparse.ArgumentParser(
        prog="fedhm",
        description="Federated learning for devices that are not alike: every client trains the largest "
        "low-rank version of one model that it can afford.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    run = verbs.add_parser("run", help="run an experiment", description="Run a preset or a config file.")
    _add_config(run)
    run.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: a new one below runs/)")
    run.set_defaults(verb="fedhm.cli.commands:run")

    resume = verbs.add_parser("resume", help="resume a run that was interrupted")
    resume.add_argument("folder", type=Path, metavar="DIR")
    resume.add_argument(
        "--workers",
        type=whole_number_or_auto("--workers", MOST_PROCESSES),
        metavar="N",
        help="engine.workers from now on (default: as the run was started)",
    )
    resume.add_argument(
        "--from",
        dest="from_round",
        type=whole_number("--from"),
        metavar="ROUND",
        help="resume from the checkpoint of this round; what came of later ones is moved aside",
    )
    resume.set_defaults(verb="fedhm.cli.commands:resume")

    compare = verbs.add_parser(
        "compare", help="run several methods and put them into one table", description=compare_arguments.DESCRIPTION
    )
    _add_config(compare, default=None)
    compare_arguments.add_arguments(compare)
    compare.set_defaults(verb="fedhm.cli.commands:compare")

    sizes = verbs.add_parser("sizes", help="what each tier costs: parameters, MACs, bytes, training memory")
    _add_config(sizes)
    sizes.set_defaults(verb="fedhm.cli.commands:sizes")

    fit = verbs.add_parser(
        "fit", help="the largest version of a model that a device can afford", description=device_arguments.FIT
    )
    _add_config(fit)
    device_arguments.add_budgets(fit)
    fit.set_defaults(verb="fedhm.cli.commands:fit")

    plan = verbs.add_parser("plan", help="which tier each device of a fleet gets, and how long a round takes it")
    _add_config(plan, default=None)
    plan.set_defaults(verb="fedhm.cli.commands:plan")

    profile = verbs.add_parser(
        "profile", help="measure what training takes on this device", description=device_arguments.PROFILE
    )
    _add_config(profile)
    device_arguments.add_profile(profile)
    profile.set_defaults(verb="fedhm.cli.commands:profile")

    report = verbs.add_parser("report", help="a page, tables and plots of one or several runs")
    report.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    report.add_argument("--out", type=Path, metavar="DIR", help="where to (default: the run's folder, or ./report)")
    report.set_defaults(verb="fedhm.cli.commands:report")

    watch = verbs.add_parser(
        "watch",
        help="the page of a run that is going on, in a browser of this machine",
        description="Serve the page of one or several runs on this machine alone; it renews itself.",
    )
    watch.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    watch.add_argument(
        "--port",
        type=whole_number("--port", 65535),
        default=0,
        metavar="N",
        help="which port to listen on (default: a free one)",
    )
    watch.set_defaults(verb="fedhm.cli.commands:watch")

    export = verbs.add_parser("export", help="models as files for devices", description=export_arguments.DESCRIPTION)
    export_arguments.add_arguments(export)
    export.set_defaults(verb="fedhm.cli.commands:export")

    listing = verbs.add_parser("presets", help="list the presets")
    listing.set_defaults(verb="fedhm.cli.listing:list_presets")

    flower = verbs.add_parser(
        "flower", help="a Flower federation on this machine", description="Flower, to try it out."
    )
    flower_verbs = flower.add_subparsers(required=True, metavar="VERB")
    up = flower_verbs.add_parser(
        "up", help="start a SuperLink and SuperNodes", description=flower_arguments.DESCRIPTION
    )
    flower_arguments.add_arguments(up)
    up.set_defaults(verb="fedhm.cli.commands:flower_up")
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


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version  # takes longer than all else that is needed for a command line

        print(f"fedhm {version('fedhm')}")
        parser.exit()
