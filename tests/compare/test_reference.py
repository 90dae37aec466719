"""Tiers of other methods are matched to FedHM's by their parameters."""

from fedhm.compare.select import RATIOS, WIDTHS, Reference, resolve_entries
from fedhm.config.loading import load_config
from fedhm.config.section import tier_name


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


def test_budgets_are_matched_by_what_they_afford() -> None:
    tiers = 'method.tiers=[1, "bytes:200kB", "bytes:200kB", "parameters:1/8"]'
    reference = Reference(load_config("digits", [tiers, "method.replan=[1]"]))
    full, large, again, small = reference._sizes
    assert (full, small) == (110_698, 17_770)
    assert large == again <= 50_000
    sizes = {ratio: reference._ratio_size(ratio) for ratio in RATIOS}
    for size, ratio in zip(reference._sizes, reference.ratios, strict=True):
        assert abs(sizes[ratio] - size) == min(abs(other - size) for other in sizes.values())
    assert (reference.ratios[0], reference.ratios[-1]) == (1, 1 / 8)
    assert reference.widths[0] == 1 > reference.widths[1] == reference.widths[2] > reference.widths[3]
    found = {
        entry.label: entry.method
        for entry in resolve_entries(["fedhm-v2", "fedhm-v3", "lowrank", "capable"], reference)
    }
    assert found["fedhm-v2"]["tiers"] == ["bytes:200kB", "bytes:200kB", "bytes:200kB", "parameters:1/8"]
    assert [label for label in found if label.startswith("lowrank")] == [
        f"lowrank:{tier_name(reference.ratios[1])}", "lowrank:1/8"
    ]  # fmt: skip
    assert found["capable"]["tiers"] == reference.ratios


def test_what_replaces_budgets_by_ratios_is_not_planned_again() -> None:
    reference = Reference(load_config("digits", ['method.tiers=["bytes:200kB", 1/8]', "method.replan=[1]"]))
    (entry,) = resolve_entries(["fedhm-v2"], reference)
    assert (entry.method["tiers"], entry.method["replan"]) == ([1 / 8, 1 / 8], [])
