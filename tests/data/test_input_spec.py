"""A made-up sample is like those of the clients: of their shape, type and kind of target."""

import numpy as np
import pytest
import torch
from torch import nn

from fedhm.config.objective import Objective
from fedhm.data.input_spec import InputSpec, majority_spec, placeholder_sample
from fedhm.data.samples import Preprocessing, Samples
from fedhm.data.tokens import Tokens
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
        (np.ones(4, dtype=np.float32), IMAGES, (1, 4), torch.float64),
        (torch.ones(4, dtype=torch.int64), PLAIN, (1, 4), torch.int64),
    ],
)
def test_inputs_are_a_shape_or_like_an_array(
    inputs: object, preprocessing: Preprocessing, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    sample, outputs = placeholder_sample(inputs, 7, nn.Identity(), preprocessing, Classification(), torch.float64)
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
    sample, found = placeholder_sample((4,), 0, nn.Linear(4, outputs), PLAIN, objective, torch.float32)
    assert found == outputs
    assert sample.labels.dtype == targets.dtype
    assert torch.equal(sample.labels, targets)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ("many", "inputs must be the shape of one input"),
        (5, r"or an array like one, not 5"),
        ((-1,), "inputs must be the shape of one input"),
        (torch.zeros(1, 8, 8, dtype=torch.uint8), "give mean and std of each channel, 1 of both"),
        ((5,), r"the model does not accept one input of shape \(5,\)"),
    ],
)
def test_what_cannot_be_is_one_sentence(inputs: object, sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        placeholder_sample(inputs, 0, nn.Linear(4, 3), PLAIN, Classification(), torch.float32)


IMAGE, ROW = InputSpec("uint8", (1, 8, 8)), InputSpec("float32", (12,))


def labelled(inputs: torch.Tensor | Tokens) -> Samples:
    return Samples(inputs, torch.zeros(len(inputs), dtype=torch.int64))


@pytest.mark.parametrize(
    ("inputs", "line"),
    [
        (torch.zeros(5, 1, 8, 8, dtype=torch.uint8), "uint8 1x8x8"),
        (torch.zeros(5, 12), "float32 12"),
        (torch.zeros(5, dtype=torch.int64), "int64"),
        (Tokens.of({"input_ids": [[1, 2], [1, 2, 3], [1] * 9]}, "test"), "attention_mask+input_ids 3"),
    ],
)
def test_a_form_travels_as_a_line(inputs: torch.Tensor | Tokens, line: str) -> None:
    form = InputSpec.of(labelled(inputs))
    assert str(form) == line
    assert InputSpec.read(line) == form
    made, _ = placeholder_sample(form.zeros(), 3, nn.Identity(), IMAGES, Classification(), torch.float32)
    assert InputSpec.of(made) == form


@pytest.mark.parametrize(
    "line",
    [
        *("", "float32 0", "float32 -1", "float32 1.5", "float33 3", "float32 3 3", "float32 3x", "__class__ 3"),
        *("float32 99999x99999", "float32 1x1x1x1x1x1x1x1x1", "float32 " + "9" * 400, "\x1b[31mfloat32 3"),
        *("input_ids", "input_ids 3x3", "input_ids 99999999", "labels 3", "input_ids+input_ids 3", "input_ids+other 3"),
    ],
)
def test_what_is_no_form_of_an_input_is_refused_in_a_line(line: str) -> None:
    with pytest.raises(FedhmError, match="is no input spec") as caught:
        InputSpec.read(line)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


def test_one_liar_does_not_decide_what_inputs_are_like() -> None:
    assert majority_spec({0: ROW, 1: IMAGE, 2: IMAGE}) == (IMAGE, [0])
    with pytest.raises(FedhmError, match=r"report different input specs \(float32 12, uint8 1x8x8\)"):
        majority_spec({0: ROW, 1: IMAGE})
    with pytest.raises(FedhmError, match="no client reports an input spec"):
        majority_spec({})


def test_texts_agree_though_their_lengths_differ_and_one_cannot_stretch_them() -> None:
    texts = {n: InputSpec("attention_mask+input_ids", (length,)) for n, length in enumerate([9, 11, 1_000_000])}
    assert majority_spec(texts) == (texts[1], [])
