"""A broken update is told apart, whatever is broken."""

import math
import re
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conftest import example
from fedhm.networks.spec import NetworkSpec
from fedhm.server.filters.admission import reason_to_refuse
from fedhm.work.messages import Task, Update
from fedhm.work.statistics import Statistics, gather
from fedhm.work.work import Expected, validate_change

OWN = {"own": torch.zeros(3)}
TASK = Task("train", 3, 5, "1/2", NetworkSpec("1/2"), {"a": torch.ones(2, 3), "b": torch.ones(2)}, OWN)
UPDATE = Update(
    "train", 3, 5, "1/2", NetworkSpec("1/2"), {"a": torch.zeros(2, 3), "b": torch.zeros(2)}, 10, (0, 2), 0.5, kept=OWN
)
KNOWN = Expected(TASK.tensors, samples=10, classes=4, labelled=True, max_change=10.0)


def test_a_good_update_is_let_in() -> None:
    assert reason_to_refuse(UPDATE, TASK, KNOWN) is None
    assert reason_to_refuse(replace(UPDATE, labels=(3, 0)), TASK, KNOWN) is None


def test_only_who_masks_its_loss_says_which_labels_it_holds() -> None:
    silent = replace(KNOWN, labelled=False)
    assert reason_to_refuse(replace(UPDATE, labels=None), TASK, silent) is None
    assert reason_to_refuse(UPDATE, TASK, silent) == "it says which labels it holds"


def test_large_numbers_whose_sum_overflows_are_let_in_without_a_limit() -> None:
    large = replace(UPDATE, tensors={**UPDATE.tensors, "b": torch.full((2,), 3e38)})
    assert reason_to_refuse(large, TASK, replace(KNOWN, max_change=0.0)) is None
    assert reason_to_refuse(large, TASK, KNOWN) == "its change has norm 4.2e+38, over 10 × that of what was sent"


MASKED = replace(TASK, tensors={**TASK.tensors, "mask": torch.full((2, 2), -1e9), "scale": torch.tensor(0.1)})
HONEST = replace(UPDATE, tensors={**UPDATE.tensors, "mask": torch.full((2, 2), -1e9), "scale": torch.tensor(0.1)})


def test_what_is_not_trained_neither_widens_the_bound_nor_has_to_be_finite() -> None:
    known = replace(KNOWN, tensors=MASKED.tensors, fixed={"mask", "scale"})
    assert reason_to_refuse(HONEST, MASKED, known) is None
    far = replace(HONEST, tensors={**HONEST.tensors, "b": torch.tensor([30.0, 30.0])})
    assert reason_to_refuse(far, MASKED, known) == "its change has norm 4.1e+01, over 10 × that of what was sent"
    endless = {"mask": torch.full((2, 2), float("-inf"))}
    task, update = (replace(each, tensors={**each.tensors, **endless}) for each in (MASKED, HONEST))
    assert reason_to_refuse(update, task, replace(known, tensors=task.tensors)) is None


@pytest.mark.parametrize(
    ("changed", "halved", "refused"),
    [
        ({}, True, None),
        ({"mask": torch.full((2, 2), float("-inf"))}, True, None),  # what half precision makes of -1e9
        ({"mask": torch.full((2, 2), float("-inf"))}, False, "mask"),
        ({"mask": torch.full((2, 2), -1.0)}, True, "mask"),
        ({"scale": torch.tensor(0.1).half().float()}, True, "scale"),  # it is no matrix, and travels as it is
        ({"scale": torch.tensor(-0.1)}, False, "scale"),
        ({"scale": torch.tensor(float("nan"))}, False, "scale"),
    ],
)
def test_what_is_not_trained_must_come_back_as_it_was_sent(
    changed: dict[str, torch.Tensor], halved: bool, refused: str | None
) -> None:
    known = replace(KNOWN, tensors=MASKED.tensors, fixed={"mask", "scale"}, halved=halved)
    found = reason_to_refuse(replace(HONEST, tensors={**HONEST.tensors, **changed}), MASKED, known)
    assert found == (refused and f"'{refused}' is not trained, but did not come back as it was sent")


def test_complex_weights_are_bounded_by_both_parts() -> None:
    task = replace(TASK, tensors={"a": torch.ones(2, dtype=torch.complex64)})
    known = replace(KNOWN, tensors=task.tensors)
    for value, reason in ((1 + 9j, None), (1 + 30j, "its change has norm 4.2e+01"), (complex(0, math.inf), "infinite")):
        found = reason_to_refuse(replace(UPDATE, tensors={"a": torch.full((2,), value)}), task, known)
        assert (found is None) if reason is None else (reason in str(found))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"round": 2}, "it answers another task, of round 2 instead of 3"),
        ({"round": 3.0}, "it answers another task"),
        ({"client": 4}, "it answers another task"),
        ({"client": None}, "it answers another task"),
        ({"tier": "full"}, "it answers another task, of tier 'full' instead of '1/2'"),
        ({"tier": "x" * 10**6}, r"^.{,200}$"),
        ({"network": torch.ones(2)}, "it answers another task"),
        ({"kind": "statistics"}, "it answers another task"),
        ({"samples": 0}, "it claims 0 samples instead of 10"),
        ({"samples": 11}, "it claims 11 samples instead of 10"),
        ({"samples": 10.0}, "it claims 10.0 samples"),
        ({"samples": "10"}, "it claims '10' samples"),
        ({"samples": True}, "it claims True samples"),
        ({"labels": None}, "it does not say which labels it holds"),
        ({"labels": (0, 4)}, "labels outside 0…3"),
        ({"labels": (-1,)}, "labels outside 0…3"),
        ({"labels": ()}, "it claims to hold no label"),
        ({"labels": (1, 1)}, "it claims a label twice"),
        ({"labels": "01"}, "its labels are '01', not class numbers"),
        ({"labels": ("0", "1")}, "not class numbers"),
        ({"labels": ((0,), (1,))}, "not class numbers"),
        ({"labels": (True,)}, "not class numbers"),
        ({"labels": {0: 1}}, "not class numbers"),
        ({"loss": float("nan")}, "its loss became NaN"),
        ({"loss": float("inf")}, "its loss became infinite"),
        ({"loss": "0.5"}, "its loss is '0.5', not a number"),
        ({"loss": 10**400}, "not a number"),
        ({"loss": torch.tensor(0.5)}, "not a number"),
        ({"tensors": {"a": torch.zeros(2, 3)}}, "it lacks the tensor 'b'"),
        ({"tensors": {**UPDATE.tensors, "c": torch.zeros(1)}}, "it adds the tensor 'c'"),
        ({"tensors": {**UPDATE.tensors, 7: torch.zeros(1), "c": torch.zeros(1)}}, "it adds the tensor"),
        ({"tensors": {**UPDATE.tensors, "y" * 10**6: torch.zeros(1)}}, r"^.{,200}$"),
        ({"tensors": [torch.zeros(2, 3), torch.zeros(2)]}, "in place of tensors"),
        ({"tensors": None}, "it has None in place of tensors"),
        ({"tensors": {**UPDATE.tensors, "a": torch.zeros(1, 3)}}, r"'a' has shape \(1, 3\) instead of \(2, 3\)"),
        ({"tensors": {**UPDATE.tensors, "a": torch.zeros(2, 3).double()}}, "'a' has type torch.float64"),
        ({"tensors": {**UPDATE.tensors, "a": torch.zeros(2, 3).cfloat()}}, "'a' has type torch.complex64"),
        ({"tensors": {**UPDATE.tensors, "b": torch.tensor([0, float("inf")])}}, "'b' holds NaN or infinite"),
        (
            {"tensors": {**UPDATE.tensors, "b": torch.tensor([float("-inf"), float("inf")])}},
            "'b' holds NaN or infinite",
        ),
        ({"tensors": {**UPDATE.tensors, "b": torch.tensor([30.0, 30.0])}}, r"its change has norm 4\.1e\+01, over 10 ×"),
        ({"kept": {}}, "it lacks the tensor 'own'"),
        ({"kept": {"own": torch.zeros(2)}}, r"'own' has shape \(2,\) instead of \(3,\)"),
        ({"kept": {"own": torch.full((3,), float("nan"))}}, "'own' holds NaN or infinite"),
        ({"kept": {"own": torch.full((3,), 6.0)}}, r"its change has norm 1\.0e\+01, over 10 ×"),
    ],
)
def test_a_bad_update_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    found = reason_to_refuse(replace(UPDATE, **changes), TASK, KNOWN)
    assert found is not None
    assert re.search(reason, found)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, requires_grad=True),
        torch.zeros(1).expand(2),
        torch.zeros(4)[::2],
        nn.Parameter(torch.zeros(2)),
        torch._neg_view(torch.zeros(2)),
        torch.zeros(2).numpy(),
        [0.0, 0.0],
        0.0,
        None,
    ],
    ids=lambda tensor: str(getattr(tensor, "layout", type(tensor).__name__)),
)
def test_only_a_plain_dense_tensor_is_one(tensor: object) -> None:
    found = reason_to_refuse(replace(UPDATE, tensors={**UPDATE.tensors, "b": tensor}), TASK, KNOWN)  # type: ignore[dict-item]
    assert found == "'b' is not a plain dense tensor"


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_a_nested_tensor_is_not_one() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    found = reason_to_refuse(replace(UPDATE, tensors={**UPDATE.tensors, "b": nested}), TASK, KNOWN)
    assert found == "'b' is not a plain dense tensor"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 6e3])
def test_the_change_is_bounded_by_what_was_sent_whatever_the_type(dtype: torch.dtype, scale: float) -> None:
    sent = torch.full((10_000,), scale, dtype=dtype)  # of norm 100 scale
    task = replace(TASK, tensors={"a": sent}, kept={})
    most = 10 * max(1.0, 100 * scale) / 100  # by which each number may move
    for moved, admitted in ((0.9 * most, True), (1.1 * most, False)):
        update = replace(UPDATE, tensors={"a": (sent.double() + moved).to(dtype)}, kept={})
        if update.tensors["a"].isfinite().all():
            assert (reason_to_refuse(update, task, replace(KNOWN, tensors=task.tensors)) is None) == admitted


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10**6), st.floats(0.01, 100), st.floats(1e-3, 1e3), st.floats(1e-3, 3), st.booleans())
def test_norms_that_spare_the_difference_decide_as_the_difference_does(
    seed: int, limit: float, size: float, moved: float, opposite: bool
) -> None:
    """An update is refused exactly if ‖update − sent‖ > limit · max(‖sent‖, 1), computed plainly in float64."""
    generator = torch.Generator().manual_seed(seed)
    sent = {name: size * torch.randn(count, generator=generator) for name, count in (("a", 300), ("b", 5))}
    update = {
        name: (-each if opposite else each) + moved * limit * size * torch.randn(each.shape, generator=generator)
        for name, each in sent.items()
    }
    far = math.hypot(*((update[name].double() - each.double()).norm().item() for name, each in sent.items()))
    most = limit * max(1.0, math.hypot(*(each.double().norm().item() for each in sent.values())))
    if not math.isclose(far, most, rel_tol=1e-5):
        expected = Expected(sent, samples=10, classes=4, max_change=limit)
        assert (validate_change(update, sent, expected) is not None) == (far > most)


def test_nothing_is_admitted_if_what_was_sent_is_not_finite() -> None:
    sent = {"a": torch.full((10,), math.nan)}
    assert validate_change({"a": torch.full((10,), 1e9)}, sent, Expected(sent, 1, 2, max_change=10.0)) is not None


def test_a_change_beyond_float64_is_refused() -> None:
    task = replace(TASK, tensors={"a": torch.zeros(3).double()}, kept={})
    update = replace(UPDATE, tensors={"a": torch.full((3,), 1.7e308, dtype=torch.float64)}, kept={})
    found = reason_to_refuse(update, task, replace(KNOWN, tensors=task.tensors))
    assert found == "its change has norm inf, over 10 × that of what was sent"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("bn.running_mean", 1e4, None),  # far from 0, where it starts
        ("bn.running_mean", -2e10, "'bn.running_mean' has the value -2e+10, not in -1e+10…1e+10"),
        ("bn.running_var", 1e9, None),
        ("bn.running_var", 0.0, None),
        ("bn.running_var", -1e-3, "'bn.running_var' has the value -0.001, not in 0…1e+20"),
        ("bn.running_var", 3e38, "'bn.running_var' has the value 3e+38, not in 0…1e+20"),
        ("bn.running_var", float("nan"), "'bn.running_var' holds NaN or infinite values"),
        ("bn.weight", 1e4, "its change has norm 1.4e+04, over 10 × that of what was sent"),
    ],
)
def test_running_averages_have_bounds_of_their_own(name: str, value: float, reason: str | None) -> None:
    sent = {"bn.weight": torch.ones(2), "bn.running_mean": torch.zeros(2), "bn.running_var": torch.ones(2)}
    task = replace(TASK, tensors=sent, kept={})
    update = replace(UPDATE, tensors={**sent, name: torch.full((2,), value)}, kept={})
    known = replace(KNOWN, tensors=sent, running={"bn.running_mean", "bn.running_var"})
    assert reason_to_refuse(update, task, known) == reason


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (-500.0, None),
        (3e38, "'logits' has the value 3e+38, not in -1e+06…1e+06"),
        (float("inf"), "'logits' holds NaN or infinite values"),
    ],
)
def test_logits_are_bounded(value: float, reason: str | None) -> None:
    task = replace(TASK, kind="distil", tensors={})
    update = replace(UPDATE, kind="distil", tensors={"logits": torch.full((7, 4), value)})
    assert reason_to_refuse(update, task, replace(KNOWN, tensors={"logits": torch.zeros(7, 4)})) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"bn/values": torch.tensor(0.0).double()}, "'bn/values' has the value 0, not in 1…90"),
        ({"bn/values": torch.tensor(91.0).double()}, "'bn/values' has the value 91, not in 1…90"),
        ({"bn/variance": torch.tensor([1.0, -1.0]).double()}, "'bn/variance' has the value -1, not in 0…1e+20"),
        ({"bn/variance": torch.tensor([1.0, 1e38]).double()}, "'bn/variance' has the value 1e+38, not in 0…1e+20"),
        ({"bn/mean": torch.tensor([0.0, 1e38]).double()}, "'bn/mean' has the value 1e+38, not in -1e+10…1e+10"),
        ({"bn/mean": torch.tensor([1.0]).double()}, "'bn/mean' has shape (1,) instead of (2,)"),
        ({"other/mean": torch.ones(2).double()}, "it adds the tensor 'other/mean'"),
    ],
)
def test_statistics_are_checked_as_well(changes: dict[str, torch.Tensor], reason: str | None) -> None:
    network = nn.Sequential(OrderedDict(bn=nn.BatchNorm2d(2)))
    expected = Statistics().expected(network, example(torch.zeros(1, 2, 3, 3)))  # nine values of one sample
    good = gather(network, [torch.randn(7, 2, 3, 3), torch.randn(3, 2, 3, 3)])
    assert good["bn/values"] == 90
    task = replace(TASK, kind="statistics")
    update = replace(UPDATE, kind="statistics", tensors={**good, **changes})
    assert reason_to_refuse(update, task, replace(KNOWN, tensors=expected)) == reason
