"""The small scale differs from the paper's in what it says, and in nothing else."""

import pytest

from fedhm.compare.select import Reference
from fedhm.paper.numbers import DataName
from fedhm.paper.scale import PRESETS, SmallScale, paper_config

NAMED = {
    *("model.width", "data.downscale", "data.crop", "data.train_samples", "train.rounds", "train.epochs"),
    *("train.batch", "train.milestones", "evaluation.every", "evaluation.static_from", "engine.threads"),
    "compare.widths",
}


@pytest.mark.parametrize("data", PRESETS)
def test_only_the_named_settings_differ(data: DataName) -> None:
    large, small = (paper_config(data, "dirichlet", "dynamic", scale).dotted() for scale in ("paper", "small"))
    assert {key for key in large.keys() | small.keys() if large.get(key) != small.get(key)} <= NAMED
    assert small["data.partition"] == "dirichlet"
    assert small["federation.heterogeneity"] == "dynamic"


@pytest.mark.parametrize("data", PRESETS)
def test_rounds_and_pixels_follow_in_proportion(data: DataName) -> None:
    large, small = (paper_config(data, "iid", "fixed", scale) for scale in ("paper", "small"))
    assert small.data is not None
    for ours, papers in zip(small.train.milestones, large.train.milestones, strict=True):
        assert ours == pytest.approx(papers * small.train.rounds / large.train.rounds, abs=0.5)
    assert small.evaluation.static_from == small.train.milestones[0]
    assert {"cifar10": 32, "cifar100": 32, "tinyimagenet": 64}[data] // small.data.downscale == SmallScale().pixels


@pytest.mark.slow
@pytest.mark.parametrize("data", PRESETS)
def test_sizes_are_matched_to_the_narrow_networks(data: DataName) -> None:
    reference = Reference(paper_config(data, "iid", "fixed", "small"))
    assert len(set(reference.widths)) == len(set(reference.bases)) == 4  # as many rows as in the paper's tables


def test_a_change_of_the_user_wins() -> None:
    config = paper_config("cifar10", "iid", "dynamic", "small", ["train.rounds=3", "method.weighting=samples"])
    assert config.train.rounds == 3
    assert config.method.model_dump()["weighting"] == "samples"
