"""The options of `fedhm flower up`, apart from what it does: that takes seconds to import."""

import argparse
from pathlib import Path

from fedhm.cli.options import whole_number

DESCRIPTION = """\
Starts a Flower SuperLink and SuperNodes on this machine and keeps them up until Ctrl-C. Certificates and the clients'
keys are made in the folder and used again the next time, as is the SuperLink's database."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clients",
        type=whole_number("--clients", 1000),
        default=4,
        metavar="N",
        help="how many SuperNodes (default: 4)",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("federation"), metavar="DIR", help="keys, logs, … (default: ./federation)"
    )
    parser.add_argument("--tiers", nargs="+", metavar="TIER", help="of the clients in turn, such as: full 1/2 1/4")
    parser.add_argument(
        "--memory",
        type=whole_number("--memory", 2**31),
        nargs="+",
        metavar="MIB",
        help="of the clients in turn, to find their tiers",
    )
    parser.add_argument(
        "--port", type=whole_number("--port", 65535), metavar="P", help="of the SuperLink (default: one that is free)"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="plain text, and whoever connects is let in: without TLS and keys"
    )
