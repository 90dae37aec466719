"""`fedhm paper` lists the tables and figures of the FedHM paper, and reproduces one of them."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from fedhm.cli.options import Verbs, add_changes, one_of, terminal, whole_number
from fedhm.errors import FedhmError
from fedhm.paper.artifacts import find_artifact, listing
from fedhm.paper.numbers import DataName, PartitionName

DESCRIPTION = """\
Without a name, lists all tables and figures of the paper. With a name, runs what is missing of it, and prints our
numbers beside the paper's. The same command again runs only what is missing. docs/paper.md has more."""


def add_paper(verbs: Verbs) -> None:
    parser = verbs.add_parser("paper", help="reproduce a table or figure of the FedHM paper", description=DESCRIPTION)
    parser.add_argument("name", nargs="?", action=_Name, metavar="NAME", help="such as table2 or figure4; none: list")
    parser.add_argument(
        "--data",
        type=one_of("--data", *get_args(DataName)),
        metavar="|".join(get_args(DataName)),
        help="the data set (default: the first that the table has)",
    )
    parser.add_argument(
        "--partition",
        type=one_of("--partition", *get_args(PartitionName)),
        metavar="|".join(get_args(PartitionName)),
        help="the paper's IID or Non-IID (default: iid)",
    )
    parser.add_argument(
        "--scale",
        type=one_of("--scale", "paper", "small"),
        default="paper",
        metavar="paper|small",
        help="the paper's networks and rounds, or narrow networks and few rounds (default: paper)",
    )
    parser.add_argument("--methods", metavar="A,B,…", help="some of the columns (default: all)")
    parser.add_argument("--seeds", type=whole_number("--seeds"), metavar="N", help="how many (default: 1)")
    parser.add_argument(
        "--jobs",
        type=whole_number("--jobs"),
        metavar="N",
        help="runs side by side (default: one on each accelerator, or without one, one for each usable core)",
    )
    parser.add_argument("--target", metavar="VALUE", help="of figure4: the accuracy to reach (default: what all reach)")
    parser.add_argument(
        "--estimate", action="store_true", help="measure some training steps, and say how long all runs would take here"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), metavar="DIR", help="default: runs/paper")
    add_changes(parser)
    parser.set_defaults(action=paper, imports="")


class _Name(argparse.Action):
    """The table or figure. Only with a name is anything heavy imported."""

    def __call__(
        self, _: argparse.ArgumentParser, namespace: argparse.Namespace, value: str | Sequence[Any] | None, *__: object
    ) -> None:
        if value == "list":
            value = None
        if value is not None:
            find_artifact(str(value), None)  # a wrong name is answered at once
            namespace.imports = "fedhm.paper.command"
        namespace.name = value


def paper(options: argparse.Namespace) -> None:
    if options.name is None:
        print(listing())
        return
    from fedhm.paper.command import PaperOptions, reproduce

    if not options.estimate:
        options.resume_hint = "; the same command resumes what is missing"
    chosen = PaperOptions(
        name=options.name,
        command=options.command,
        data=options.data,
        partition=options.partition,
        scale=options.scale,
        seeds=options.seeds,
        jobs=options.jobs,
        methods=tuple(name.strip() for name in (options.methods or "").split(",") if name.strip()),
        target=options.target,
        out=options.out,
        changes=tuple(options.changes),
        estimate=options.estimate,
    )
    if failed := reproduce(chosen, terminal()):
        raise FedhmError(failed)
