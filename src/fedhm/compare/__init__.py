"""Several methods on the same data with the same seeds: what each is, running them, what may be compared."""

from pathlib import Path

SPEC_FILE = "comparison.json"  # in a comparison's folder: what it is made of
METHODS = "fedhm,fedhm-paper,lowrank,capable,heterofl,splitmix,fedavg"  # that are compared if nothing is said
TUNE_SHARE = 0.2  # of each client's samples, held out: a few hundred in small data sets, and most is left to train on


def is_comparison(folder: Path) -> bool:
    """Tell whether a folder is that of a comparison."""
    return (folder / SPEC_FILE).exists()
