"""Runs are hit until the time is over; the table tells what was lost, and so does the exit code."""

import argparse
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from forked import without_figures
from torture.deployment import torture_deployment
from torture.locally import torture_local_runs
from torture.mutations import torture_folders
from torture.tally import Tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their moments")
    parser.add_argument("--minutes", type=float, default=5.0, help="about how long; each fault comes once at least")
    parser.add_argument("--kills", type=int, default=1, help="how often the server of local runs is killed, at least")
    parser.add_argument("--mutations", type=int, default=1000, help="how many folders of finished runs are changed")
    parser.add_argument("--without-flower", action="store_true", help="local runs only")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # either way nothing is left running, also in a shell's background
        signal.signal(number, signal.default_int_handler)
    rng, tally = random.Random(options.seed), Tally(lambda line: print(line, flush=True))
    seconds = 60 * options.minutes
    warnings.filterwarnings("ignore", "the report does without the layers")
    without_figures()  # of the runs whose folders are changed; the others are processes of their own
    with TemporaryDirectory(prefix="fedhm-torture-") as scratch:
        torture_folders(Path(scratch) / "changed", rng, tally, options.mutations)
        began = time.monotonic()
        local = seconds if options.without_flower else seconds / 2
        torture_local_runs(Path(scratch), rng, tally, began + local, options.kills)
        if not options.without_flower:
            torture_deployment(Path(scratch), rng, tally, began + seconds)
    print(f"\n{tally.table()}\n\nseed {options.seed}, {(time.monotonic() - began) / 60:.1f} minutes")
    return 1 if tally.lost else 0


if __name__ == "__main__":
    sys.exit(main())
