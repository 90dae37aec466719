"""Kinds of data that people hand in: each is taken and right, or refused with a sentence that says what to do."""

from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import fedhm
from fedhm.data.convert import check_clients, named_client_tests, named_weights, to_samples
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.objectives.classification import Classification
from fedhm.objectives.multilabel import MultiLabel
from fedhm.objectives.regression import Regression
from fedhm.objectives.segmentation import Segmentation

N = 12
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
PIXELS = torch.randint(0, 256, (N, 3, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
MASKS = (PIXELS[:, 0] > 128).long()
FRAME = pd.DataFrame({"a": X[:, 0].numpy(), "b": X[:, 1].numpy(), "c": X[:, 2].numpy(), "d": X[:, 3].numpy()})


def read_only(array: Tensor) -> Any:
    array = array.numpy().copy()
    array.flags.writeable = False
    return array


class Map(Dataset[Any]):
    def __init__(self, item: Callable[[int], Any], count: int = N) -> None:
        self.item, self.count = item, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield X[0], 0


def images_of_hugging_face() -> Any:
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in PIXELS]
    return datasets.Dataset.from_dict({"image": pictures, "label": Y.tolist()}).cast_column("image", datasets.Image())


def read(data: Any, objective: Any = None) -> tuple[Any, Tensor]:
    """Return all inputs and targets, as batches have them."""
    samples = to_samples(data, "client 0", torch.float32, objective or Classification())
    plain = Preprocessing((0.0,) * 3, (1 / 255,) * 3) if samples.are_images else Preprocessing()
    (batch,) = Feed(samples, plain).ordered(100)
    return batch


TABLES = {
    "a pair of tensors": (X, Y),
    "a pair of numpy arrays": (X.numpy(), Y.numpy()),
    "a pair of lists": (X.tolist(), Y.tolist()),
    "arrays that are read-only": (read_only(X), read_only(Y)),
    "an array that runs backwards": (X.numpy()[::-1].copy()[::-1], Y.numpy()),
    "an array of the other byte order": (X.numpy().astype(">f4"), Y.numpy().astype(">i8")),
    "numpy's float64": (X.double().numpy(), Y.numpy()),
    "labels as floating-point numbers": (X, Y.float()),
    "labels of 8 bits": (X, Y.byte()),
    "a tensor that requires a gradient": (X.clone().requires_grad_(), Y),
    "a pair of a pandas frame and a series": (FRAME, pd.Series(Y.numpy())),
    "a pair of a frame and a frame": (FRAME, pd.DataFrame({"y": Y.numpy()})),
    "a pandas frame with a column of labels": FRAME.assign(label=Y.numpy()),
    "a dictionary with named columns": {"x": X, "y": Y},
    "a dictionary of lists": {"x": X.tolist(), "label": Y.tolist()},
    "a list of pairs": [(x, int(y)) for x, y in zip(X, Y, strict=True)],
    "a list of dictionaries": [{"x": x, "label": int(y)} for x, y in zip(X, Y, strict=True)],
    "samples": Samples(X, Y),
    "a TensorDataset": TensorDataset(X, Y),
    "a part of a TensorDataset": Subset(TensorDataset(X, Y), range(N)),
    "joined data sets": ConcatDataset([TensorDataset(X[:5], Y[:5]), TensorDataset(X[5:], Y[5:])]),
    "a data set of pairs": Map(lambda index: (X[index], Y[index])),
    "a data set of numpy pairs": Map(lambda index: (X[index].numpy(), int(Y[index]))),
    "a data set of dictionaries": Map(lambda index: {"x": X[index], "target": int(Y[index])}),
    "a DataLoader": DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True),
    "a data set of Hugging Face": datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()}),
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables(kind: str) -> None:
    inputs, targets = read(TABLES[kind])
    assert torch.equal(inputs, X)
    assert torch.equal(targets, Y)


IMAGES = {
    "uint8 images": lambda: (PIXELS, Y),
    "a list of Pillow images": lambda: [
        (Image.fromarray(image.permute(1, 2, 0).numpy()), int(y)) for image, y in zip(PIXELS, Y, strict=True)
    ],
    "a data set of Pillow images": lambda: Map(
        lambda index: (Image.fromarray(PIXELS[index].permute(1, 2, 0).numpy()), int(Y[index]))
    ),
    "images of Hugging Face": images_of_hugging_face,
}


@pytest.mark.parametrize("kind", IMAGES)
def test_images(kind: str) -> None:
    inputs, targets = read(IMAGES[kind]())
    torch.testing.assert_close(inputs, PIXELS.float(), rtol=1e-6, atol=1e-4)
    assert torch.equal(targets, Y)


SEVERAL = {
    "a tuple of inputs": ((X, Y), Y),
    "a TensorDataset of three": TensorDataset(X, Y, Y),
    "a list of triples": [(x, y, int(y)) for x, y in zip(X, Y, strict=True)],
    "a list of nested pairs": [((x, y), int(y)) for x, y in zip(X, Y.reshape(-1, 1), strict=True)],
    "a data set of triples": Map(lambda index: (X[index], Y[index], int(Y[index]))),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_inputs_by_position(kind: str) -> None:
    inputs, targets = read(SEVERAL[kind])
    assert isinstance(inputs, tuple)
    assert torch.equal(inputs[0], X)
    assert torch.equal(inputs[1].flatten(), Y)
    assert torch.equal(targets, Y)


@pytest.mark.parametrize(
    "data",
    [
        ({"table": X, "kind": Y}, Y),
        {"table": X, "kind": Y, "label": Y},
        Map(lambda index: {"table": X[index], "kind": Y[index], "label": Y[index]}),
        Map(lambda index: ({"table": X[index], "kind": Y[index]}, Y[index])),
        [{"table": x, "kind": y, "label": y} for x, y in zip(X, Y, strict=True)],
    ],
)
def test_several_inputs_by_name(data: Any) -> None:
    inputs, targets = read(data)
    assert list(inputs) == ["table", "kind"]
    assert torch.equal(inputs["table"], X)
    assert torch.equal(inputs["kind"], Y)
    assert torch.equal(targets, Y)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 8)
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, table: Tensor, kind: Tensor) -> Tensor:
        return self.layers(torch.cat([table, self.table(kind)], 1))


@pytest.mark.parametrize("data", [((X, Y), Y), ({"table": X, "kind": Y}, Y), SEVERAL["a data set of triples"]])
def test_a_model_with_several_inputs_trains(data: Any) -> None:
    settings = {"train": {"rounds": 2}, "method": {"tiers": [1, "1/4"]}, "engine": {"threads": 1}}
    found = fedhm.run(TwoInputs(), [data, data], data, settings)
    assert found.metrics.keys() == {"full", "1/4"}


TARGETS: dict[str, tuple[Any, Any, Tensor]] = {
    "numbers": ((X, X[:, 0]), Regression(), X[:, 0]),
    "several numbers": ((X, X[:, :2]), Regression(), X[:, :2]),
    "a frame with a number": (FRAME.assign(target=X[:, 0].numpy()), Regression(), X[:, 0]),
    "several labels": ((X, (X > 0).long()), MultiLabel(), (X > 0).float()),
    "masks": ((PIXELS, MASKS), Segmentation(), MASKS),
    "masks with an axis of channels": ((PIXELS, MASKS[:, None].byte()), Segmentation(), MASKS),
    "masks of Pillow": (
        [(image, Image.fromarray(mask.byte().numpy())) for image, mask in zip(PIXELS, MASKS, strict=True)],
        Segmentation(),
        MASKS,
    ),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_targets(kind: str) -> None:
    data, objective, expected = TARGETS[kind]
    assert torch.equal(read(data, objective)[1], expected)


def missing(column: str) -> pd.DataFrame:
    frame = FRAME.assign(label=Y.numpy()).astype({column: object})
    frame.loc[3, column] = None
    return frame


REFUSED: dict[str, tuple[Any, str]] = {
    "an empty array": ((X[:0], Y[:0]), r"client 0 has no samples"),
    "an empty list": ([], "client 0 has no samples"),
    "an empty data set": (Map(lambda index: index, 0), "client 0 has no samples"),
    "a list of two arrays": ([X, Y], r"client 0 is a list of two arrays: give a pair, \(inputs, labels\)"),
    "an array without labels": (X, r"client 0 is an array without labels: give a pair \(inputs, labels\)"),
    "a list of arrays": (list(X), "must be pairs of an array and a class number"),
    "three arrays": ((X, X, Y), r"client 0 must be a pair \(inputs, labels\), not a tuple of 3"),
    "fewer labels": ((X, Y[:5]), "labels must be one integer per sample"),
    "one label": ((X, 1), "labels must be one integer per sample"),
    "one-hot labels": ((X, torch.eye(3)[Y]), r"take labels\.argmax\(1\) if they are one-hot"),
    "texts as labels": ((X, ["a"] * N), "must be arrays of numbers"),
    "nothing": (None, "not a NoneType"),
    "a text": ("data.csv", r"client 0 must be a pair \(inputs, labels\) or a dataset with a length, not a str"),
    "a number": (3, "not a int"),
    "a class": (Map, "not a type"),
    "a generator": ((pair for pair in [(X, Y)]), "not a generator"),
    "an iterable data set": (Endless(), "client 0 is an IterableDataset, which has no samples by index"),
    "a loader of one": (DataLoader(Endless()), "client 0 is an IterableDataset"),
    "a frame without labels": (FRAME, "client 0 has the columns 'a', 'b', 'c', 'd', and none is called 'label'"),
    "a frame with texts": (FRAME.assign(city="x", y=1), "the column 'city' of client 0 holds texts"),
    "a frame with missing values": (missing("b"), "the column 'b' of client 0 holds texts, dates, missing values"),
    "a frame with NaN": (FRAME.assign(a=np.nan, y=1), "the inputs of client 0 hold NaN"),
    "two columns of labels": ({"x": X, "label": Y, "y": Y}, "has several columns that could be the labels"),
    "labels alone": ({"label": Y}, "has no column beside its labels"),
    "a dictionary of splits": ({"train": (X, Y), "test": (X, Y)}, "client 0 is a dictionary of the splits train, test"),
    "columns of different lengths": ({"x": X, "z": X[:4], "y": Y}, "client 0 has inputs of different lengths"),
    "rows with different entries": ([{"x": X[0], "y": 0}, {"z": X[0], "y": 0}], "must all have the entries"),
    "samples of different shapes": ([(X[0], 0), (X[0, :2], 0)], "the samples of client 0 differ in shape"),
    "a sparse matrix of scipy": ((csr_matrix(X.numpy()), Y), r"hand in matrix\.toarray\(\)"),
    "a sparse tensor": ((X.to_sparse(), Y), "must be plain dense tensors"),
    "masked numbers": ((np.ma.masked_greater(X.numpy(), 0), Y), "some values are masked"),
    "objects": ((np.array([object()] * N), Y), "an array of Python objects"),
    "infinite inputs": ((X / 0, Y), "the inputs of client 0 hold NaN or infinite values, first in sample 0"),
    "a data set that raises": (Map(lambda index: [][index]), r"sample 0 of client 0 cannot be read: IndexError"),
    "a data set of texts without a tokenizer": (Map(lambda _: {"text": "a", "label": 0}), "client 0 has texts"),
    "a data set of single values": (Map(lambda index: X[index]), "must be pairs of an array and a class number"),
    "a TensorDataset without labels": (TensorDataset(X), "client 0 has inputs but no labels"),
    "labels below zero": ((X, Y - 1), "labels outside 0…2"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str) -> None:
    data, sentence = REFUSED[kind]
    with pytest.raises(fedhm.FedhmError, match=sentence) as error:
        fedhm.run(nn.Linear(4, 3), [data], (X, Y), {"train": {"rounds": 1}})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ((X, Y), "not one pair of arrays"),
        ({"x": X, "y": Y}, "not one dictionary of arrays"),
        ({"train": [(X, Y)], "test": [(X, Y)]}, "not a dictionary of the splits train, test"),
        (TensorDataset(X, Y), "not a TensorDataset"),
        (DataLoader(TensorDataset(X, Y)), "not a DataLoader"),
        (FRAME, "not a DataFrame"),
        (X, "not a Tensor"),
        ("data", "not a str"),
        (None, "not a NoneType"),
        ([], "a federation needs at least one client"),
    ],
)
def test_what_is_no_list_of_clients(clients: Any, sentence: str) -> None:
    with pytest.raises(fedhm.FedhmError, match=sentence):
        fedhm.run(nn.Linear(4, 3), clients, (X, Y), {"train": {"rounds": 1}})


def test_clients_may_have_names() -> None:
    named = {"north": (X, Y), "south": (X + 1, Y)}
    assert torch.equal(check_clients(named)[1][0], X + 1)
    assert named_client_tests({"south": (X, Y)}, named) == [None, (X, Y)]
    with pytest.raises(fedhm.FedhmError, match="client_test names 'east', which is none of the clients"):
        named_client_tests({"east": None}, named)
    with pytest.raises(fedhm.FedhmError, match="give both by name, or both as lists"):
        named_client_tests({"east": None}, [(X, Y)])


def test_named_clients_may_be_frames_and_have_weights() -> None:
    frames = {"north": FRAME.assign(label=Y.numpy()), "south": FRAME.assign(label=Y.numpy())}
    settings: dict[str, Any] = {"train": {"rounds": 1}, "federation": {"weights": {"south": 2.0, "north": 1.0}}}
    inputs = torch.tensor(FRAME.to_numpy(np.float32).tolist())
    model = nn.Linear(inputs.shape[1], 3)
    found = fedhm.run(model, frames, (inputs, Y), {**settings, "method": {"name": "fedavg"}})
    assert found.config.federation.weights == (1.0, 2.0)
    with pytest.raises(fedhm.FedhmError, match="must have the same names: 'east' is in one of them only"):
        named_weights({"east": 1.0, "north": 1.0, "south": 1.0}, frames)
    with pytest.raises(fedhm.FedhmError, match=r"federation\.weights is a dictionary, and clients is none"):
        named_weights({"east": 1.0}, [(X, Y)])


def test_crop_and_flip_would_not_move_masks() -> None:
    with pytest.raises(fedhm.FedhmError, match="crop and flip move images and not their targets"):
        fedhm.run(nn.Conv2d(3, 2, 1), [(PIXELS, MASKS)], None, {}, objective="segmentation", flip=True)
