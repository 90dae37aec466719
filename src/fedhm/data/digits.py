"""The 1,797 handwritten digits of 8×8 pixels that ship inside scikit-learn."""

import numpy as np
import torch

from fedhm.data.samples import Samples, Source, channel_statistics

CLASSES = 10
TEST_EVERY = 5


def read_digits() -> Source:
    """Every fifth digit of each class is for testing, whatever the seed, so that accuracies compare."""
    from sklearn.datasets import load_digits  # a second that `import fedhm` need not take

    pixels, targets = load_digits(return_X_y=True)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = targets.astype(np.int64)

    for_testing = np.zeros(len(labels), dtype=bool)
    for label in range(CLASSES):
        for_testing[np.flatnonzero(labels == label)[TEST_EVERY - 1 :: TEST_EVERY]] = True
    train, test = (
        Samples(torch.from_numpy(images[chosen]), torch.from_numpy(labels[chosen]))
        for chosen in (~for_testing, for_testing)
    )
    mean, std = channel_statistics(train.inputs)
    return Source(train, test, CLASSES, mean, std)
