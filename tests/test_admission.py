"""A broken update is told apart, whatever is broken."""

import re
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch

from fedhm.admission import objection
from fedhm.batchnorm import blank
from fedhm.messages import Task, Update

OWN = {"own": torch.zeros(3)}
TASK = Task("train", 3, 5, "1/2", "1/2", {"a": torch.ones(2, 3), "b": torch.ones(2)}, OWN)
UPDATE = Update("train", 3, 5, "1/2", "1/2", {"a": torch.zeros(2, 3), "b": torch.zeros(2)}, 10, None, 0.5, kept=OWN)


def test_a_good_update_is_let_in() -> None:
    assert objection(UPDATE, TASK, TASK.tensors, 4) is None


def test_large_numbers_whose_sum_overflows_are_let_in() -> None:
    large = replace(UPDATE, tensors={**UPDATE.tensors, "b": torch.full((2,), 3e38)})
    assert objection(large, TASK, TASK.tensors, 4) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"round": 2}, "it answers another task"),
        ({"client": 4}, "it answers another task"),
        ({"tier": "full"}, "it answers another task"),
        ({"network": "full"}, "it answers another task"),
        ({"kind": "statistics"}, "it answers another task"),
        ({"samples": 0}, "it claims 0 samples"),
        ({"labels": (0, 4)}, "labels outside 0…3"),
        ({"labels": (-1,)}, "labels outside 0…3"),
        ({"loss": float("nan")}, "its loss became NaN"),
        ({"loss": float("inf")}, "its loss became infinite"),
        ({"tensors": {"a": torch.zeros(2, 3)}}, "it lacks the tensor 'b'"),
        ({"tensors": {**UPDATE.tensors, "c": torch.zeros(1)}}, "it adds the tensor 'c'"),
        ({"tensors": {**UPDATE.tensors, "a": torch.zeros(1, 3)}}, r"'a' has shape \(1, 3\) instead of \(2, 3\)"),
        ({"tensors": {**UPDATE.tensors, "a": torch.zeros(2, 3).double()}}, "'a' has type torch.float64"),
        ({"tensors": {**UPDATE.tensors, "b": torch.tensor([0, float("inf")])}}, "'b' holds NaN or infinite"),
        (
            {"tensors": {**UPDATE.tensors, "b": torch.tensor([float("-inf"), float("inf")])}},
            "'b' holds NaN or infinite",
        ),
        ({"kept": {}}, "it lacks the tensor 'own'"),
        ({"kept": {"own": torch.zeros(2)}}, r"'own' has shape \(2,\) instead of \(3,\)"),
        ({"kept": {"own": torch.full((3,), float("nan"))}}, "'own' holds NaN or infinite"),
    ],
)
def test_a_bad_update_is_refused_with_the_reason(changes: dict[str, object], reason: str) -> None:
    found = objection(replace(UPDATE, **changes), TASK, TASK.tensors, 4)  # type: ignore[arg-type]
    assert found is not None
    assert re.search(reason, found)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"bn/values": torch.tensor(0.0).double()}, "'bn/values' is below what statistics can be"),
        ({"bn/variance": torch.tensor([1.0, -1.0]).double()}, "'bn/variance' is below what statistics can be"),
        ({"bn/mean": torch.tensor([1.0]).double()}, "'bn/mean' has shape (1,) instead of (2,)"),
        ({"other/mean": torch.ones(2).double()}, "it adds the tensor 'other/mean'"),
    ],
)
def test_statistics_are_checked_as_well(changes: dict[str, torch.Tensor], reason: str | None) -> None:
    network = torch.nn.Sequential(OrderedDict(bn=torch.nn.BatchNorm1d(2)))
    expected = blank(network, torch.zeros(1, 2))
    good = {**expected, "bn/values": torch.tensor(9.0).double(), "bn/mean": torch.tensor([-1.0, 1.0]).double()}
    task = replace(TASK, kind="statistics")
    update = replace(UPDATE, kind="statistics", tensors={**good, **changes})
    assert objection(update, task, expected, 4) == reason
