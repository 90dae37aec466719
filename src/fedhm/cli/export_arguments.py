"""The options of `fedhm export`, apart from what it does: that takes seconds to import."""

import argparse
from pathlib import Path

from fedhm.cli.options import one_of

DESCRIPTION = """\
Writes the models of a finished run's tiers as files that devices run: ONNX, torch.export's .pt2 or ExecuTorch's .pte.
They take raw images, and each is read again by its own runtime and compared with the network before it counts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
