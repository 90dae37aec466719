"""Architectures that the library does not know train at every tier, and a page says what each tier keeps of them."""

from pathlib import Path

import pytest

from architectures import ARCHITECTURES, END, START, TIERS, Architecture, shares_of, table, train

OWN = [each for each in ARCHITECTURES if each.source == "here"]
FOREIGN = [each for each in ARCHITECTURES if each.source != "here"]


@pytest.mark.filterwarnings("ignore::fedhm.errors.FedhmWarning")
@pytest.mark.parametrize("architecture", OWN, ids=lambda each: each.name)
def test_networks_of_our_own_train_at_every_tier(architecture: Architecture) -> None:
    assert train(architecture).keys() == set(TIERS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", FOREIGN, ids=lambda each: each.name)
def test_networks_of_transformers_train_at_every_tier(architecture: Architecture) -> None:
    pytest.importorskip("transformers")
    assert train(architecture).keys() == set(TIERS)


@pytest.mark.parametrize(
    ("name", "most"),
    [("MobileNetV3", 0.5), ("EfficientNet-Lite0", 0.55), ("ShuffleNetV2", 0.7), ("GRU", 0.3)],
)
def test_a_quarter_of_the_rank_keeps_far_less_than_the_model(name: str, most: float) -> None:
    architecture = next(each for each in OWN if each.name == name)
    _, shares, macs = shares_of(architecture)
    assert shares["1/8"] < shares["1/4"] < min(most, shares["1/2"])
    assert macs is not None
    if architecture.data == "images":
        assert macs["1/4"] < 0.7


def test_the_page_lists_every_architecture() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "architectures.md").read_text()
    listed = page.partition(START)[2].partition(END)[0]
    assert len(ARCHITECTURES) >= 20
    assert all(f"| {each.name} |" in listed for each in ARCHITECTURES)
    assert table([]).splitlines()[0] in listed
