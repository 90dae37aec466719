"""A colour means one thing on a page, can be told from its neighbours by everybody, and has a twin for dark pages."""

import itertools
import math
import re

import pytest

from fedhm.compare.plots import layer_plots, measure_bars, network_plots
from fedhm.compare.report import ComparisonReport
from fedhm.compare.results import EntryRuns
from fedhm.measure.cost import LayerCost
from fedhm.report.palette import (
    CATEGORIES,
    DARK_TWINS,
    INK,
    MEASURES,
    NEUTRAL,
    TIERS,
    category_look,
    dark_twins_css,
    tier_palette,
)
from fedhm.report.plot import Line, Plot, render_svg
from fedhm.report.sections import run_sections
from made_runs import eventful_run, made_run

# what somebody without one kind of cone sees, by Machado, Oliveira and Fernandes (2009), on linear RGB
SEEN_WITHOUT = {
    "nothing": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "L": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "M": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "S": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
PAPER, DARK_PAPER = "#ffffff", "#16181b"


def linear(colour: str) -> list[float]:
    values = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def oklab(rgb: list[float]) -> tuple[float, float, float]:
    r, g, b = rgb
    cones = (
        0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b,
        0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b,
        0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b,
    )
    long, medium, short = (math.cbrt(max(0.0, cone)) for cone in cones)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def distance(one: str, other: str, without: str) -> float:
    """Return how different two colours look; of a black and a white it is 1."""
    seen = [
        [sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in SEEN_WITHOUT[without]]
        for colour in (one, other)
    ]
    return math.dist(*(oklab([min(1.0, max(0.0, value)) for value in each]) for each in seen))


def contrast(one: str, other: str) -> float:
    light = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (one, other)))
    return (light[1] + 0.05) / (light[0] + 0.05)


@pytest.mark.parametrize("without", SEEN_WITHOUT)
def test_neighbours_are_told_apart_by_everybody(without: str) -> None:
    four, categories = tier_palette(4), CATEGORIES
    for colours in (four, [DARK_TWINS[colour] for colour in four]):
        assert min(distance(a, b, without) for a, b in itertools.pairwise(colours)) > 0.1
    for names in (categories, [DARK_TWINS[colour] for colour in categories]):
        assert min(distance(a, b, without) for a, b in itertools.combinations(names, 2)) > 0.085


def test_every_colour_can_be_seen_on_its_paper() -> None:
    for colour, twin in DARK_TWINS.items():
        assert contrast(colour, PAPER) > (1.9 if colour in MEASURES else 2.3)  # bars are large
        assert contrast(twin, DARK_PAPER) > 2.8


def test_tiers_get_lighter_from_the_largest_to_the_smallest() -> None:
    for count in range(1, len(TIERS) + 1):
        lightness = [oklab(linear(colour))[0] for colour in tier_palette(count)]
        assert lightness == sorted(set(lightness))
        assert len(lightness) == count
    assert len(tier_palette(30)) == 30


def test_no_two_methods_look_alike() -> None:
    looks = [category_look(number) for number in range(20)]
    assert len(set(looks)) == 20


def test_kinds_of_things_share_no_colour() -> None:
    kinds = (set(TIERS), set(CATEGORIES), set(MEASURES), {INK}, {NEUTRAL})
    assert sum(map(len, kinds)) == len(set.union(*kinds)) == len(DARK_TWINS)


def test_on_the_page_of_a_run_colours_are_tiers() -> None:
    sections = run_sections([eventful_run(), eventful_run(name="other")])
    plots = [part for section in sections for part in section.parts if isinstance(part, Plot)]
    meanings: dict[str, set[str]] = {}
    for line in (line for plot in plots for line in plot.lines):
        if line.colour not in (INK, NEUTRAL):
            meanings.setdefault(line.colour, set()).add(line.tier)
    assert set(meanings) <= set(TIERS)
    assert all(len(tiers) == 1 for tiers in meanings.values())


def test_on_the_page_of_a_comparison_colours_are_methods_tiers_or_measures() -> None:
    curve = [{"full": 0.5, "1/4": 0.4}, {"full": 0.9, "1/4": 0.8}]
    entries = [
        EntryRuns("fedhm", [made_run("fedhm-seed0", {"full": 1000, "1/4": 300}, curve)]),
        EntryRuns(
            "fedavg",
            [made_run("fedavg-seed0", {"full": 1000}, [{"full": c["full"]} for c in curve], {"name": "fedavg"})],
        ),
    ]
    layers = {tier: {"conv": LayerCost(10, 100), "fc": LayerCost(5, 50)} for tier in ("full", "1/4")}
    plots = [plot for found in ComparisonReport(entries, "…", layers).plots.values() for plot in found]
    meanings: dict[str, set[tuple[str, str]]] = {}
    for line in (line for plot in plots for line in plot.lines):
        kind = "tier" if line.tier else "measure" if line.kind == "bars" else "method"
        meanings.setdefault(line.colour, set()).add((kind, line.tier or line.run or line.label))
    assert all(len(found) == 1 for found in meanings.values())
    kinds = {kind for found in meanings.values() for kind, _ in found}
    assert kinds == {"tier", "measure", "method"}


def test_bars_of_measures_differ_without_colour() -> None:
    first, second = measure_bars({"communication": [1.0], "computation": [2.0]})
    assert (first.hatched, second.hatched) == (False, True)
    assert {first.colour, second.colour} == set(MEASURES)


def test_tiers_keep_the_colours_of_the_other_plots() -> None:
    layers = {tier: {"conv": LayerCost(10, 100)} for tier in ("full", "1/4")}
    given = {"full": TIERS[0], "1/2": TIERS[4], "1/4": TIERS[9]}
    assert [line.colour for line in layer_plots(layers, given)[0].lines] == [TIERS[0], TIERS[9]]
    assert [line.colour for line in layer_plots(layers, {"full": TIERS[0]})[0].lines] == tier_palette(2)
    assert {line.colour for line in network_plots(layers, each="network")[0].lines} <= set(CATEGORIES)


def test_pictures_within_a_page_follow_its_dark_mode() -> None:
    name = f"a {TIERS[0]}"
    svg = render_svg(Plot("t", "x", "y", [Line(name, [1, 2], [1, 2], TIERS[0]), Line("b", [1], [1], INK)], "words"))
    assert f"stroke: var(--c{TIERS[0][1:]}, {TIERS[0]})" in svg
    assert name in svg
    css = dark_twins_css()
    assert re.search(rf"--c{TIERS[0][1:]}: {DARK_TWINS[TIERS[0]]}\b", css)
    assert css.startswith("@media screen and (prefers-color-scheme: dark)")
