"""Diabetes: the progression of a disease in 442 patients, to be predicted from ten measurements. In scikit-learn.

Measurements and progression are brought to mean 0 and deviation 1, by those of the patients to train on.
"""

import numpy as np
import torch

from fedhm.data.samples import Samples, Source

TEST_EVERY = 5


def read_diabetes() -> Source:
    """Read the patients; every fifth is for testing, whatever the seed, so that metrics are comparable."""
    from sklearn.datasets import load_diabetes  # takes a second, which other sources need not

    inputs, progression = load_diabetes(return_X_y=True, scaled=False)
    table = np.column_stack([inputs, progression])
    for_testing = np.arange(len(table)) % TEST_EVERY == TEST_EVERY - 1
    mean, deviation = table[~for_testing].mean(0), table[~for_testing].std(0)
    scaled = torch.from_numpy((table - mean) / deviation).float()
    train, test = (
        Samples(scaled[chosen, :-1], scaled[chosen, -1])
        for chosen in (torch.from_numpy(~for_testing), torch.from_numpy(for_testing))
    )
    return Source(train, test, 1, (), ())
