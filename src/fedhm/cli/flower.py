"""`fedhm flower up` starts a Flower federation on this machine."""

import argparse
from pathlib import Path

from fedhm.cli.options import Verbs, terminal, whole_number

DESCRIPTION = """\
Starts a Flower SuperLink and SuperNodes on this machine and keeps them up until Ctrl-C. It needs a terminal of its own.
When it is up, type in another terminal, in the same folder: 'fedhm run digits --set engine.name=flower
engine.superlink=federation federation.clients=4'. Certificates and the clients' keys are made in the folder and used
again the next time, as is the SuperLink's database."""


def add_flower(verbs: Verbs) -> None:
    flower = verbs.add_parser(
        "flower",
        help="a Flower federation on this machine",
        description="Flower, to try it out: 'fedhm flower up' in one terminal, 'fedhm run' in another.",
    )
    parser = flower.add_subparsers(required=True, metavar="VERB").add_parser(
        "up", help="start a SuperLink and SuperNodes, in a terminal of their own", description=DESCRIPTION
    )
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
        "--insecure", action="store_true", help="without TLS and keys: plain text, and anyone may connect"
    )
    parser.set_defaults(action=flower_up, imports="")


def flower_up(options: argparse.Namespace) -> None:
    from fedhm.cli import exit_on_interrupt

    with exit_on_interrupt():
        from fedhm.flower import up  # refuses, if Flower is not installed
    up(options, terminal())
