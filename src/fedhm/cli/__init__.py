"""The command line: fedhm run · resume · compare · sizes · report · presets · flower up."""

import argparse
import shlex
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedhm.cli import commands
from fedhm.compare import command as comparing
from fedhm.config.arguments import whole_number, whole_number_or_auto
from fedhm.config.settings import MOST_PROCESSES
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.flower import up as flower_up
from fedhm.machine.printable import printable_lines

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what a command line asks for and return the exit code; what is wrong is one sentence on stderr."""
    options = argparse.Namespace()
    try:
        with warnings.catch_warnings():
            _show_as_sentences()
            _parser().parse_args(arguments, options)
            options.command = shlex.join(["fedhm", *(sys.argv[1:] if arguments is None else arguments)])
            options.verb(options)
    except FedhmError as error:
        return _failed(str(error), 1)
    except KeyboardInterrupt:
        return _failed(f"stopped{_resume_hint(options)}", 130, before="\n")
    except OSError as error:  # a full disk, a folder that may not be written
        return _failed(f"{error}{_resume_hint(options)}", 1)
    except UnicodeEncodeError as error:  # of a path in a config, in an argument or in the environment
        line = error.object[: error.start].rpartition("\n")[2] + error.object[error.start :].partition("\n")[0]
        shown = line.encode(errors="surrogateescape").decode(errors="backslashreplace").strip()
        return _failed(f"there is a name that is not in UTF-8: {shown}{_resume_hint(options)}", 1)
    return 0


def _show_as_sentences() -> None:
    """Show the library's own warnings as sentences, and all others as Python does, until warnings are reset."""
    otherwise = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, FedhmWarning):
            print(f"fedhm: {message}", file=sys.stderr)
        else:
            otherwise(message, category, *where, **more)

    warnings.showwarning = show


def _failed(sentence: str, code: int, before: str = "") -> int:
    print(f"{before}fedhm: {printable_lines(sentence)}", file=sys.stderr)
    return code


def _resume_hint(options: argparse.Namespace) -> str:
    said: str = getattr(options, "resume_hint", "")
    return said


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
    run.set_defaults(verb=commands.run)

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
    resume.set_defaults(verb=commands.resume)

    compare = verbs.add_parser(
        "compare", help="run several methods and put them into one table", description=comparing.DESCRIPTION
    )
    _add_config(compare, default=None)
    comparing.add_arguments(compare)
    compare.set_defaults(verb=lambda options: comparing.compare(options, commands.Terminal()))

    sizes = verbs.add_parser("sizes", help="what each tier costs: parameters, MACs, bytes, training memory")
    _add_config(sizes)
    sizes.set_defaults(verb=commands.sizes)

    report = verbs.add_parser("report", help="tables and plots of one or several runs")
    report.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    report.add_argument("--out", type=Path, metavar="DIR", help="where to (default: the run's folder, or ./report)")
    report.set_defaults(verb=commands.report)

    listing = verbs.add_parser("presets", help="list the presets")
    listing.set_defaults(verb=commands.list_presets)

    flower = verbs.add_parser(
        "flower", help="a Flower federation on this machine", description="Flower, to try it out."
    )
    flower_verbs = flower.add_subparsers(required=True, metavar="VERB")
    up = flower_verbs.add_parser("up", help="start a SuperLink and SuperNodes", description=flower_up.DESCRIPTION)
    flower_up.add_arguments(up)
    up.set_defaults(verb=lambda options: flower_up.up(options, commands.Terminal()))
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
