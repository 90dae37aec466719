"""Whatever is handed in as data, only the library's own error leaves `fedhm.run`."""

import warnings
from typing import Any

import numpy as np
import pandas as pd
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedhm

X, Y = torch.randn(8, 4), torch.arange(8) % 3
TYPES = ("float32", "float64", "float16", "int64", "int8", "uint8", "uint16", "bool", "complex64", "U3", "O", "M8[s]")
NAMES = ("x", "y", "label", "labels", "image", "text", "input_ids", "attention_mask", "train", "test", "mask", "", 3)


class Rows:
    """A data set of any length whose items are anything, and which may raise."""

    def __init__(self, items: list[Any], length: Any, error: Exception | None) -> None:
        self.items, self.length, self.error = items, length, error

    def __len__(self) -> Any:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.error is not None and index > 0:
            raise self.error
        if isinstance(self.length, int) and index >= max(self.length, 0) + 100:
            raise IndexError(index)  # iteration over an object without a length of its own ends here
        return self.items[index % len(self.items)]


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    shape = draw(st.sampled_from([(), (0,), (1,), (8,), (8, 4), (8, 1), (8, 4, 1), (8, 1, 4, 4), (8, 3, 2, 2), (0, 4)]))
    dtype = draw(st.sampled_from(TYPES))
    array = np.ones(shape).astype(dtype)
    if dtype == "O" and array.size:
        array.flat[0] = draw(st.sampled_from([None, "text", [1], {}]))
    if dtype.startswith("float") and array.size and draw(st.booleans()):
        array.flat[0] = draw(st.sampled_from([np.nan, np.inf, -1.0]))
    if dtype.startswith("int") and array.size and draw(st.booleans()):
        array.flat[0] = draw(st.sampled_from([-1, 100]))
    if dtype not in ("U3", "O", "M8[s]") and draw(st.booleans()):
        return torch.from_numpy(array)
    return array


scalars = st.sampled_from(
    [None, 0, 1, -1, 3.5, float("nan"), True, "text", b"bytes", 10**30, 1j, object(), int, len, X, Y, (X, Y), X[0],
     Image.new("L", (4, 4)), Image.new("RGB", (4, 4)), pd.DataFrame({"a": [1.0] * 8, "y": [0] * 8}),
     pd.Series([0, 1] * 4), TensorDataset(X, Y), range(8)]
)  # fmt: skip
values = st.recursive(
    scalars | arrays(),
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.tuples(inner, inner, inner),
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        st.builds(
            Rows,
            st.lists(inner, min_size=1, max_size=2),
            st.sampled_from([0, 1, 4]),
            st.sampled_from([None, None, ValueError("no"), KeyError(3), AttributeError("x"), RuntimeError("odd")]),
        ),
    ),
    max_leaves=5,
)


def outcome(**given_data: Any) -> str:
    """Return how a run ends: with a result, or with the library's own error. Anything else is raised."""
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"clients": [(X, Y)], "test": (X, Y), **given_data}
    config = {"train": {"rounds": 1, "batch": 4}, "engine": {"threads": 1, "workers": 1}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fedhm.run(nn.Linear(4, 3), config=config, method="fedavg", **arguments)
    except fedhm.FedhmError:
        return "refused"
    return "ran"


FUZZ = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))


@FUZZ
@given(values)
def test_one_client(data: Any) -> None:
    outcome(clients=[data])


@FUZZ
@given(values)
def test_a_second_client(data: Any) -> None:
    outcome(clients=[(X, Y), data])


@FUZZ
@given(values, st.sampled_from(["clients", "test", "public", "client_test"]))
def test_any_argument(data: Any, argument: str) -> None:
    outcome(**{argument: data})


@FUZZ
@given(values)
def test_a_loader(data: Any) -> None:
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        try:
            loader = DataLoader(data, batch_size=2)
        except (TypeError, ValueError):
            return
        outcome(clients=[loader])


@FUZZ
@given(values, st.sampled_from(["regression", "segmentation", "multilabel", "causal_lm", "sequence_classification"]))
def test_other_objectives(data: Any, objective: str) -> None:
    outcome(clients=[data], test=None, objective=objective)


def test_right_data_runs() -> None:
    assert outcome() == "ran"
