"""The largest version that is quick enough, by times that are known."""

import pytest
import torch
from torch import nn

from fedhm.errors import FedhmError
from fedhm.measure.fit import Fit, ModelVersions, TrainingSetup, fit_versions
from fedhm.measure.time import fit_to_seconds


def versions() -> ModelVersions:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return ModelVersions(model, TrainingSetup((64,), 8))


def by_parameters(found: Fit) -> float:
    return found.expected.parameters / 1000


def test_a_version_that_is_quick_enough_stays_and_says_its_time() -> None:
    every = versions()
    whole = fit_versions(every, {"memory": 10**9})
    for most in (None, 1e9):
        found = fit_to_seconds(every, whole, by_parameters, most)
        assert found.plan == whole.plan
        assert found.expected.seconds == by_parameters(whole)


def test_ranks_fall_until_it_is() -> None:
    every = versions()
    whole = fit_versions(every, {"memory": 10**9})
    found = fit_to_seconds(every, whole, by_parameters, 20.0)
    assert found.expected.seconds is not None
    assert 10.0 < found.expected.seconds <= 20.0
    assert found.expected.seconds == by_parameters(found)


def test_what_is_too_little_is_said_with_the_closest() -> None:
    every, asked = versions(), []

    def seconds(found: Fit) -> float:
        asked.append(found.number)
        return by_parameters(found)

    with pytest.raises(FedhmError, match=r"^seconds = 0\.001 is too little .*the closest version, of .*give at least"):
        fit_to_seconds(every, fit_versions(every, {"memory": 10**9}), seconds, 0.001)
    assert asked == [every.last, 0], "the smallest version is measured once"
