"""Tasks and updates come out of the codec that all engines share as they went in."""

import json
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import (
    UPDATE_VALUES,
    Task,
    TaskOptions,
    Update,
    task_from,
    task_values,
    update_from,
    update_values,
)

SPEC = NetworkSpec("1/2", "nested 1/2", "nested", 3, (("0", 4), ("3", 8)), (NetworkSpec("1/8"),))
TENSORS: Tensors = {"weight": torch.ones(2, 3)}
KEPT: Tensors = {"own": torch.zeros(4)}

numbers = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
options = st.builds(
    TaskOptions,
    micro_batch=st.none() | st.integers(0, 64),
    checkpointing=st.none() | st.booleans(),
    measure=st.booleans(),
    batch=st.integers(0, 512),
    digest_epochs=st.integers(0, 9),
    digest_lr=numbers,
    kept_rank=st.integers(0, 64),
    penalty=numbers,
    extra=st.dictionaries(st.text(max_size=5), plain, max_size=3),
)


@given(options)
def test_a_task_comes_back_with_all_its_options(given_options: TaskOptions) -> None:
    task = Task("train", 3, 7, "1/2", SPEC, TENSORS, KEPT, given_options)
    found = task_from(json.loads(json.dumps(task_values(task))), task.tensors, task.kept)
    assert {each.name: getattr(found, each.name) for each in fields(Task)} == vars(task)
    assert found.tensors is TENSORS


# Not at its default: a field that the codec forgets would come back with another value.
OTHER_OPTIONS = {
    "micro_batch": 0,
    "checkpointing": False,
    "measure": True,
    "batch": 5,
    "test_batch_statistics": True,
    "digest_epochs": 2,
    "digest_lr": 0.5,
    "kept_rank": 4,
    "penalty": 1e-3,
    "extra": {"deep": [1, {"x": None}]},
}


@pytest.mark.parametrize("name", [each.name for each in fields(TaskOptions)])
def test_every_option_travels_by_itself(name: str) -> None:
    task = Task("train", 1, 0, "full", NetworkSpec("full"), {}, options=TaskOptions(**{name: OTHER_OPTIONS[name]}))  # type: ignore[arg-type]
    values = json.loads(json.dumps(task_values(task)))
    assert values["options"] == {name: OTHER_OPTIONS[name]}  # options at their defaults take no bytes
    assert task_from(values, {}, {}) == task


@given(
    st.integers(1, 2**62),
    st.none() | st.lists(st.integers(0, 9), max_size=4).map(tuple),
    numbers,
    st.integers(0, 99),
    st.none() | st.integers(0, 2**40),
)
def test_an_update_comes_back_as_it_was(
    samples: int, labels: tuple[int, ...] | None, loss: float, position: int, down: int | None
) -> None:
    update = Update("train", 3, 7, "1/2", SPEC, TENSORS, samples, labels, loss, position, KEPT, down, up=12)
    values = update_values(update)
    assert values.keys() == UPDATE_VALUES
    by_engine = {"position": position, "down": down, "up": 12}  # an engine carries these by itself
    found = update_from(json.loads(json.dumps(values)) | by_engine, update.tensors, update.kept)
    assert {each.name: getattr(found, each.name) for each in fields(Update)} == vars(update)
    assert found.labels is None or type(found.labels) is tuple


def test_values_of_wrong_types_are_left_for_admission() -> None:
    update = Update("train", 1, 0, "full", NetworkSpec("full"), {}, 5, None, 0.0)
    broken = update_from(update_values(update) | {"network": 7, "labels": "all", "samples": None}, {}, {})
    assert (broken.network, broken.labels, broken.samples) == (7, "all", None)
