"""A made-up sample is like those of the clients: of their shape, type and kind of target."""

import numpy as np
import pytest
import torch
from torch import nn

from fedhm.config.sections.objective import Objective
from fedhm.data.batches import Preprocessing
from fedhm.data.form import made_up
from fedhm.errors import FedhmError
from fedhm.objectives.classification import Classification
from fedhm.objectives.regression import Regression

PLAIN, IMAGES = Preprocessing(), Preprocessing((0.5,), (0.25,))


@pytest.mark.parametrize(
    ("inputs", "preprocessing", "shape", "dtype"),
    [
        ((4,), PLAIN, (1, 4), torch.float64),
        ([1, 2, 2], IMAGES, (1, 1, 2, 2), torch.uint8),
        (np.ones(4, dtype=np.float32), PLAIN, (1, 4), torch.float64),
        (torch.ones(4, dtype=torch.int64), PLAIN, (1, 4), torch.int64),
    ],
)
def test_inputs_are_a_shape_or_like_an_array(
    inputs: object, preprocessing: Preprocessing, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    sample, outputs = made_up(inputs, 7, nn.Identity(), preprocessing, Classification(), torch.float64)
    assert (tuple(sample.inputs.shape), sample.inputs.dtype, outputs) == (shape, dtype, 7)


@pytest.mark.parametrize(
    ("objective", "outputs", "targets"),
    [
        (Classification(), 3, torch.zeros(1, dtype=torch.int64)),
        (Regression(), 3, torch.zeros(1, 3)),
        (Regression(), 1, torch.zeros(1)),
    ],
)
def test_the_model_tells_how_many_outputs_there_are(objective: Objective, outputs: int, targets: torch.Tensor) -> None:
    sample, found = made_up((4,), 0, nn.Linear(4, outputs), PLAIN, objective, torch.float32)
    assert found == outputs
    assert sample.labels.dtype == targets.dtype
    assert torch.equal(sample.labels, targets)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (None, "without test samples the server must be told the shape of an input"),
        ("many", "inputs must be the shape of one input"),
        (5, r"or an array like one, not 5"),
        ((-1,), "inputs must be the shape of one input"),
        ((5,), r"the model does not accept one input of shape \(5,\)"),
    ],
)
def test_what_cannot_be_is_one_sentence(inputs: object, sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        made_up(inputs, 0, nn.Linear(4, 3), PLAIN, Classification(), torch.float32)
