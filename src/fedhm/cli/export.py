"""`fedhm export` writes the models of a finished run as files for devices."""

import argparse
from pathlib import Path

from fedhm.cli.options import Verbs, one_of, terminal

DESCRIPTION = """\
Writes the models of a finished run's tiers as files that devices run: ONNX, torch.export's .pt2 or ExecuTorch's .pte.
They take raw images, and each is read again by its own runtime and compared with the network before it counts."""


def add_export(verbs: Verbs) -> None:
    parser = verbs.add_parser("export", help="models as files for devices", description=DESCRIPTION)
    parser.add_argument("folder", type=Path, metavar="DIR", help="of a finished run")
    parser.add_argument(
        "--tier", dest="tiers", nargs="+", default=[], metavar="TIER", help="such as 1/8 (default: all of the run)"
    )
    parser.add_argument(
        "--to",
        nargs="+",
        type=one_of("--to", "onnx", "torch", "executorch"),
        default=["onnx"],
        metavar="onnx|torch|executorch",
        help="one format or several (default: onnx)",
    )
    parser.add_argument("--int8", action="store_true", help="8-bit ONNX files, too, with what they cost in accuracy")
    parser.add_argument(
        "--card", action="store_true", help="measure latency and memory here: a card for each tier, and a plot"
    )
    parser.add_argument("--classes", nargs="+", default=[], metavar="NAME", help="names of the classes, in order")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to (default: export in the run's folder)")
    parser.set_defaults(action=export, imports="fedhm.export.command")


def export(options: argparse.Namespace) -> None:
    from fedhm.cli import exit_on_interrupt
    from fedhm.export.command import export
    from fedhm.export.write import remove_unfinished

    out = options.out or options.folder / "export"
    with exit_on_interrupt(lambda: remove_unfinished(out)):
        export(options, terminal())
