"""The learning rate by round: milestones, half a cosine, constant, and a warm-up before each."""

import math

import pytest

from fedhm.config.loading import load_config
from fedhm.config.schema import Config, FederationConfig, TrainConfig
from fedhm.errors import FedhmError


def rates(**settings: object) -> list[float]:
    train = TrainConfig(lr=1.0, **settings)  # type: ignore[arg-type]
    return [train.learning_rate(number) for number in range(1, train.rounds + 1)]


def test_rates() -> None:
    assert rates(rounds=4, milestones=[2]) == [1.0, 1.0, 0.1, 0.1]
    assert rates(rounds=3, schedule="constant") == [1.0, 1.0, 1.0]
    expected = [0.5 * (1 + math.cos(math.pi * done / 4)) for done in range(4)]
    assert rates(rounds=4, schedule="cosine") == pytest.approx(expected)
    assert rates(rounds=5, warmup_rounds=3, schedule="constant") == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    warmed = rates(rounds=6, warmup_rounds=2, schedule="cosine")
    assert warmed == pytest.approx([1 / 3, 2 / 3, *expected])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["train.schedule=cosine", "train.milestones=[3]"], "milestones are for schedule = 'milestones'"),
        (["train.warmup_rounds=30", "train.rounds=20"], "warmup_rounds = 30 leave nothing of 20 rounds"),
        (["train.schedule=linear"], "train.schedule: input should be 'milestones', 'cosine' or 'constant'"),
        (["federation.weights=[1, 2]"], "weights has 2 numbers for 20 clients"),
        (["federation.weights=[0, 1]", "federation.clients=2"], "greater than 0"),
    ],
)
def test_wrong_settings_are_one_sentence(changes: list[str], sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        load_config("digits", changes)


def test_settings_that_are_not_used_leave_a_config_as_it_was() -> None:
    text = Config().to_toml()
    assert not any(key in text for key in ("schedule", "warmup_rounds", "begun_rounds", "weights"))
    assert "schedule" in Config(train=TrainConfig(schedule="cosine")).to_toml()
    assert "weights" in Config(federation=FederationConfig(clients=1, weights=(2.0,))).to_toml()
