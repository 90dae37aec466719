"""Tiers of other methods are matched to FedHM's by their parameters."""

from fedhm.compare.reference import WIDTHS, Reference
from fedhm.config.reading import load_config


def test_matched_widths_are_the_nearest_of_all() -> None:
    reference = Reference(load_config("digits"))
    assert reference._sizes == [110_698, 64_618, 33_386, 17_770]
    all_sizes = {width: reference._narrow_size(width) for width in WIDTHS}
    for size, width in zip(reference._sizes, reference.widths, strict=True):
        assert abs(all_sizes[width] - size) == min(abs(other - size) for other in all_sizes.values())
    assert reference.widths[0] == 1
    base = all_sizes[min(reference.widths)]
    assert reference.bases == [round(size / base) for size in reference._sizes]
    assert reference.bases[-1] == 1


def test_a_tier_with_two_shares_has_two_widths() -> None:
    reference = Reference(load_config("digits", ["method.tiers=[1/2, 1/2, 1/8]"]))
    assert reference.widths[0] == reference.widths[1] > reference.widths[2]


def test_given_ones_are_taken_as_they_are() -> None:
    reference = Reference(
        load_config("digits", ["method.tiers=[1,0.5]", "compare.widths=[0.3, 1]", "compare.bases=[1, 5]"])
    )
    assert (reference.widths, reference.bases) == ([1, 0.3], [5, 1])


def test_layers_of_all_tiers_are_the_same_ones() -> None:
    layers = Reference(load_config("digits")).layers()
    assert list(layers) == ["full", "1/2", "1/4", "1/8"]
    assert all(list(of_tier) == list(layers["full"]) for of_tier in layers.values())
    assert layers["1/8"]["conv3"].parameters < layers["full"]["conv3"].parameters
    assert layers["1/8"]["fc"] == layers["full"]["fc"]


def test_the_full_model_is_matched_by_the_full_width_even_where_narrower_ones_round_to_it() -> None:
    assert Reference(load_config("digits", ["model.width=0.25"])).widths[0] == 1
