import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhm.lowrank.diagnostics import energy_beyond
from fedhm.lowrank.svd import factorize, squared_norm

sizes = st.integers(1, 8)


def random(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(sizes, sizes, sizes), min_size=1, max_size=3), st.integers(0, 1000))
def test_is_the_error_of_truncating_the_layers(layers: list[tuple[int, int, int]], seed: int) -> None:
    weights = {str(i): random(m, n, seed + i) for i, (m, n, _) in enumerate(layers)}
    ranks = {str(i): rank for i, (_, _, rank) in enumerate(layers)}
    spectra = {layer: torch.linalg.svdvals(weight) for layer, weight in weights.items()}
    error = sum(float(spectra[layer][rank:].norm()) ** 2 for layer, rank in ranks.items())
    total = sum(weight.square().sum().item() for weight in weights.values())
    energies = {layer: squared_norm(weight) for layer, weight in weights.items()}
    assert energy_beyond(energies, spectra, ranks) == pytest.approx(error / total, rel=1e-9, abs=1e-12)
    leading = {layer: spectra[layer][:rank] for layer, rank in ranks.items()}
    assert energy_beyond(energies, leading, ranks) == energy_beyond(energies, spectra, ranks)


def test_by_hand() -> None:
    spectra = {"a": torch.tensor([4.0, 3.0]), "b": torch.tensor([2.0, 1.0]), "other": torch.tensor([9.0, 9.0])}
    energies = {"a": 25.0, "b": 5.0, "other": 162.0}
    assert energy_beyond(energies, spectra, {"a": 1, "b": 1}) == pytest.approx((9 + 1) / 30, rel=1e-12)
    assert energy_beyond(energies, spectra, {"a": 2}) == 0


def test_rounding_never_makes_it_negative() -> None:
    for seed in range(20):
        weight = random(30, 3, seed).float() @ random(3, 40, seed + 100).float()
        spectra = {"a": factorize(weight, 3).spectrum}
        assert 0 <= energy_beyond({"a": squared_norm(weight)}, spectra, {"a": 3}) < 1e-6


def test_a_model_of_zeros_has_nothing_beyond() -> None:
    assert energy_beyond({"a": 0.0}, {"a": torch.zeros(3)}, {"a": 1}) == 0
