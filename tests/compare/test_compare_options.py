"""What the options of `fedhm compare` do to the config, before anything runs."""

from argparse import Namespace
from pathlib import Path

import pytest

from fedhm.cli import main
from fedhm.compare.command import _config, _default_folder
from fedhm.methods.fedhm import FedHMConfig


def options(*changes: str, setting: str | None = None, data: str | None = None) -> Namespace:
    return Namespace(config="digits", changes=list(changes), setting=setting, data=data, model=None)


@pytest.mark.parametrize(("setting", "weighting"), [("fixed", "uniform"), ("dynamic", "softmax")])
def test_the_setting_brings_the_papers_weighting(setting: str, weighting: str) -> None:
    config = _config(options(setting=setting))
    assert isinstance(config.method, FedHMConfig)
    assert (config.federation.heterogeneity, config.method.weighting) == (setting, weighting)


def test_a_weighting_that_was_asked_for_stays() -> None:
    config = _config(options("method.weighting=samples", setting="dynamic"))
    assert isinstance(config.method, FedHMConfig)
    assert config.method.weighting == "samples"


def test_the_folder_is_named_by_what_is_compared_and_how() -> None:
    config = _config(options(setting="dynamic", data="dirichlet"))
    assert _default_folder("digits", config) == Path("runs/compare-digits-dynamic-dirichlet")
    assert _default_folder("sub/mine.toml", _config(options())) == Path("runs/compare-mine-fixed-iid")


def test_other_methods_presets_have_no_weighting_of_fedhms() -> None:
    assert _config(options("method.name=heterofl", setting="dynamic")).method.weighting == "uniform"  # type: ignore[union-attr]


@pytest.mark.parametrize("option", [["--methods", "fedhm"], ["--seeds", "2"], ["--set", "train.rounds=3"]])
def test_runs_that_exist_are_taken_as_they_are(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--runs", "somewhere", *option]) == 1
    assert f"fedhm: --runs takes runs as they are: {option[0]} does not go with it" in capsys.readouterr().err
