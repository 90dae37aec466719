"""`fedhm compare` runs several methods on the same data and puts them into one table."""

import argparse
from pathlib import Path

from fedhm.cli.options import Verbs, add_config, add_model, number, one_of, terminal, whole_number
from fedhm.compare import METHODS, TUNE_SHARE

DESCRIPTION = """\
Runs several methods on the same data with the same seeds and prints one table: a row for each capability
level, accuracy or another headline metric as mean ± deviation over the seeds. The same command again runs only what is
missing."""


def add_compare(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "compare", help="run several methods and put them into one table", description=DESCRIPTION
    )
    add_config(parser, default=None)
    parser.add_argument("--methods", metavar="A,B,…", help=f"docs/comparison.md has all names (default: {METHODS})")
    parser.add_argument(
        "--seeds", type=whole_number("--seeds"), metavar="N", help="how many, from the config's seed on (default: 3)"
    )
    parser.add_argument(
        "--setting",
        type=one_of("--setting", "fixed", "dynamic"),
        metavar="fixed|dynamic",
        help="clients keep their tier, or draw one every round",
    )
    parser.add_argument(
        "--data",
        type=one_of("--data", "iid", "dirichlet", "dirichlet-feddf", "by-tier"),
        metavar="iid|dirichlet|dirichlet-feddf|by-tier",
        help="how samples are partitioned over the clients",
    )
    parser.add_argument(
        "--target",
        metavar="VALUE",
        help="a target accuracy, or value of another headline metric, to show its costs (default: what all reach)",
    )
    parser.add_argument(
        "--jobs",
        type=whole_number("--jobs"),
        metavar="N",
        help="runs side by side (default: one for each usable core, or for each accelerator)",
    )
    parser.add_argument(
        "--tune",
        action="append",
        default=[],
        metavar="KEY=A,B,…",
        help="choose a setting for each entry on held-out training samples, before the seeds run; several make a grid",
    )
    parser.add_argument(
        "--tune-rounds",
        type=whole_number("--tune-rounds"),
        metavar="N",
        help="rounds of the runs to choose by (default: train.rounds)",
    )
    parser.add_argument(
        "--tune-share",
        type=number("--tune-share", "a share between 0 and 1, such as 0.2", above=0, below=1),
        metavar="SHARE",
        help=f"of each client's training samples, held out to choose by (default: {TUNE_SHARE})",
    )
    add_model(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/compare-PRESET-SETTING-DATA")
    parser.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="compare runs that exist (default --out: comparison)",
    )
    parser.set_defaults(action=compare, imports="fedhm.compare.command")


def compare(options: argparse.Namespace) -> None:
    from fedhm.compare.command import compare

    compare(options, terminal())
