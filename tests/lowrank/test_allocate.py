"""Ranks by layer: as good as trying all of them, nested, and one ratio where the spectrum says nothing."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedhm.lowrank.plan import (
    LayerSpectrum,
    RankPlan,
    layer_spectra,
    levels_after,
    levels_of_plan,
    plan_ranks,
    random_share,
    rank_order,
    with_rank_costs,
)
from fedhm.models import resnet10

TELLING = [100.0, 1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01]


@st.composite
def some_layers(draw: st.DrawFn) -> dict[str, LayerSpectrum]:
    """Layers of a few ranks whose leading directions have most of the energy, and that differ in cost and scale."""
    found = {}
    for name in "abc":
        rest = sorted(draw(st.lists(st.floats(0.01, 3), min_size=7, max_size=7)), reverse=True)
        scale, cost = draw(st.floats(0.1, 10)), draw(st.integers(1, 9))
        found[name] = LayerSpectrum([scale * energy for energy in [40.0, *rest]], (8, 8), 4, float(cost))
    return found


@settings(max_examples=40, deadline=None)
@given(layers=some_layers(), budget=st.floats(0.0, 1.0))
def test_no_other_ranks_keep_more_energy_up_to_one_step(layers: dict[str, LayerSpectrum], budget: float) -> None:
    def spent(ranks: dict[str, int]) -> float:
        return sum(layer.cost * ranks[name] for name, layer in layers.items())

    def kept(ranks: dict[str, int]) -> float:
        return sum(sum(layer.energies[: ranks[name]]) for name, layer in layers.items())

    most = layers["a"].most
    least, largest = spent(dict.fromkeys(layers, 1)), spent(dict.fromkeys(layers, most))
    limit = least + budget * (largest - least)
    choices = (dict(zip(layers, ranks, strict=True)) for ranks in itertools.product(range(1, most + 1), repeat=3))
    best = max(kept(ranks) for ranks in choices if spent(ranks) <= limit)

    # without the steps that make a layer dense, which brute force does not try
    counts = dict.fromkeys(layers, 1)
    within, beyond = dict(counts), None
    for name in rank_order(layers):
        counts[name] += 1
        if counts[name] > most:
            continue
        now = {each: min(count, most) for each, count in counts.items()}
        if spent(now) > limit:
            beyond = now
            break
        within = now
    assert kept(within) <= best + 1e-9
    assert best <= kept(beyond or within) + 1e-9


@settings(max_examples=20, deadline=None)
@given(layers=some_layers())
def test_a_smaller_budget_has_no_larger_rank_anywhere(layers: dict[str, LayerSpectrum]) -> None:
    order = rank_order(layers)
    assert order == rank_order(layers)
    before = levels_after(layers, order, 0)
    assert set(before.values()) == {1}
    for count in range(1, len(order) + 1):
        after = levels_after(layers, order, count)
        assert all(after[name] >= rank for name, rank in before.items())
        assert sum(after.values()) == sum(before.values()) + 1
        before = after
    assert levels_of_plan(layers, {}) == before, "the last version is dense everywhere"


def test_a_flat_spectrum_gives_back_the_uniform_ratio() -> None:
    layers = {
        str(size): LayerSpectrum([float(size)] * size, (size, size), size // 2, 2.0 * size) for size in (16, 32, 64)
    }
    order = rank_order(layers)
    count = sum(size // 8 - 1 for size in (16, 32, 64))
    assert levels_after(layers, order, count) == {"16": 2, "32": 4, "64": 8}


def test_random_first_weights_give_back_the_uniform_ratio() -> None:
    torch.manual_seed(3)
    model = resnet10(width=0.25)
    layers = layer_spectra(model.state_dict(), plan_ranks(model, 1e-9))
    assert not any(layer.tells for layer in layers.values())
    order = rank_order(layers)
    for ratio in (1 / 2, 1 / 4, 1 / 8):
        uniform = levels_of_plan(layers, plan_ranks(model, ratio))
        count = sum(uniform.values()) - len(uniform)
        assert levels_after(layers, order, count) == uniform


def test_a_trained_looking_spectrum_moves_ranks_to_where_the_energy_is() -> None:
    strong, weak = LayerSpectrum(TELLING, (8, 8), 4, 16.0), LayerSpectrum([e / 100 for e in TELLING], (8, 8), 4, 16.0)
    assert strong.tells
    assert levels_after({"w": weak, "s": strong}, rank_order({"w": weak, "s": strong}), 2) == {"w": 1, "s": 3}
    dear = with_rank_costs({"w": weak, "s": strong}, {"w": 1.0, "s": 1000.0})
    assert levels_after(dear, rank_order(dear), 2) == {"w": 3, "s": 1}, "per cost, the cheap one has more"


def test_the_share_of_random_numbers_is_that_of_random_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((300, 300), (150, 300)):
        energies = torch.linalg.svdvals(torch.randn(shape, generator=generator)).square()
        for part in (0.1, 0.5):
            share = energies[: round(part * len(energies))].sum() / energies.sum()
            assert abs(random_share(shape, part) - share) < 0.01


def test_layers_of_zeros_count_as_flat() -> None:
    layer = nn.Linear(8, 8)
    nn.init.zeros_(layer.weight)
    found = layer_spectra({"a.weight": layer.weight}, RankPlan({"a": 1}))["a"]
    assert not found.tells
    assert found.kept(1) == 1.0
