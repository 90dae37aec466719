"""Comparisons: several methods on the same data with the same seeds, in one table."""

from pathlib import Path

SPEC_FILE = "comparison.json"  # in a comparison's folder: its entries and their runs
METHODS = "fedhm,fedhm-paper,lowrank,capable,heterofl,splitmix,fedavg"  # the default of --methods
TUNE_SHARE = (
    0.2  # of each client's samples, held out for --tune: a few hundred in small data sets, and most remain for training
)


def is_comparison(folder: Path) -> bool:
    """Tell whether a folder is that of a comparison."""
    return (folder / SPEC_FILE).exists()
