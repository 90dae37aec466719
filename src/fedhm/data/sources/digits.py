"""The 1,797 handwritten digits of 8×8 pixels that ship inside scikit-learn."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhm.data.samples import Samples, Source, channel_statistics

CLASSES = 10
FILE = Path("datasets", "data", "digits.csv.gz")  # in scikit-learn
TEST_EVERY = 5


def read_digits() -> Source:
    """Read the digits; every fifth of each class is for testing, whatever the seed, so that metrics are comparable."""
    pixels, targets = _table()
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = targets.astype(np.int64)

    for_testing = np.zeros(len(labels), dtype=bool)
    for label in range(CLASSES):
        for_testing[np.flatnonzero(labels == label)[TEST_EVERY - 1 :: TEST_EVERY]] = True
    train, test = (
        Samples(torch.from_numpy(images[chosen]), torch.from_numpy(labels[chosen]))
        for chosen in (~for_testing, for_testing)
    )
    mean, std = channel_statistics(train.tensor)
    return Source(train, test, CLASSES, mean, std)


def _table() -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
    """Return pixels (N, 64) and labels, from the file where it is.

    Importing scikit-learn takes longer than the demo's round, and on Flower each task has a process of its own.
    """
    package = find_spec("sklearn")
    places = (package.submodule_search_locations if package else None) or []
    for place in places:
        if (Path(place) / FILE).exists():
            table = np.loadtxt(Path(place) / FILE, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits  # of a version that keeps the file elsewhere

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels
