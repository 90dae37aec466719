"""The arguments of `fedhm fit` and `fedhm profile`, apart from what they do: that imports torch."""

import argparse
import re
from pathlib import Path

from fedhm.cli.options import number
from fedhm.config.units import KINDS

FIT = (
    "Find the largest version of a model that meets all budgets: ranks by layer, and how to train it. The spectrum is "
    "that of the model's first weights."
)
BUDGETS = {
    "memory": "of a training step, such as 128MB",
    "bytes": "of one transfer of the network, such as 5MB",
    "macs": "of one sample's forward pass, such as 50M",
    "parameters": "such as 1.5M",
}
PROFILE = """\
Run it on a device: it measures the seconds of a step and the peak memory of training each tier, plainly, with
checkpointing, in micro-batches and with both, each in a process of its own, and writes a device file for
[[federation.devices]] and for the node config of a SuperNode."""


def add_budgets(parser: argparse.ArgumentParser) -> None:
    _take_negative_sizes(parser)
    for kind in KINDS:
        parser.add_argument(f"--{kind}", metavar="SIZE", help=BUDGETS[kind])
    seconds = number("--seconds", "a number above 0", above=0)
    parser.add_argument(
        "--seconds",
        type=seconds,
        metavar="S",
        help="of a training step, measured on this machine in a process of its own",
    )


def _take_negative_sizes(parser: argparse.ArgumentParser) -> None:
    """Take -5MB for a size, of which a sentence says what is wrong, and not for an option that nobody knows."""
    parser._negative_number_matcher = re.compile(r"-\d")


def add_profile(parser: argparse.ArgumentParser) -> None:
    _take_negative_sizes(parser)
    parser.add_argument("--out", type=Path, default=Path("device.json"), metavar="FILE", help="default: device.json")
    parser.add_argument("--name", metavar="NAME", help="of the device (default: this host's)")
    parser.add_argument("--memory", metavar="SIZE", help="that it can spare for training, such as 512MB")
    parser.add_argument("--up", metavar="RATE", help="of its link to the server, such as 10Mbit")
    parser.add_argument("--down", metavar="RATE", help="likewise from the server")
