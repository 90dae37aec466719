import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhm.lowrank.diagnostics import Tail, largest_norm, spectral_constants

spectra_of_layers = st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=6), min_size=1, max_size=3)


def plain(spectra: dict[str, list[float]], ranks: list[dict[str, int]]) -> tuple[float, float]:
    """The formulas of the module's docstring, one number at a time."""
    first, second = [], []
    for layer, spectrum in spectra.items():
        roots = []
        for plan in ranks:
            rank = plan.get(layer, len(spectrum))
            roots.append([value**0.5 if i < rank else 0.0 for i, value in enumerate(spectrum)])
        mean = [sum(column) / len(ranks) for column in zip(*roots, strict=True)]
        first.append(sum((m**2 - value) ** 2 for m, value in zip(mean, spectrum, strict=True)))
        second += [sum((m - r) ** 2 for m, r in zip(mean, root, strict=True)) for root in roots]
    return max(first), max(second)


@settings(deadline=None, max_examples=100)
@given(spectra_of_layers, st.data())
def test_equals_the_plain_loop(values: list[list[float]], data: st.DataObject) -> None:
    spectra = {f"layer{i}": sorted(spectrum, reverse=True) for i, spectrum in enumerate(values)}
    plans = st.dictionaries(st.sampled_from(sorted(spectra)), st.integers(1, 7))
    ranks = data.draw(st.lists(plans, min_size=1, max_size=6))
    tensors = {layer: torch.tensor(spectrum, dtype=torch.float64) for layer, spectrum in spectra.items()}
    assert spectral_constants(tensors, ranks) == pytest.approx(plain(spectra, ranks), rel=1e-9, abs=1e-12)


def test_by_hand() -> None:
    # √Σ = (2, 1); one participant keeps both, one keeps the first: mean (2, ½), squared (4, ¼)
    kappas = spectral_constants({"a": torch.tensor([4.0, 1.0])}, [{}, {"a": 1}])
    assert kappas == (0.75**2, 0.25)


def test_zero_when_everybody_has_full_rank() -> None:
    spectra = {"a": torch.tensor([9.0, 3.0, 0.5], dtype=torch.float64), "b": torch.tensor([1.0])}
    for ranks in ([{}, {}, {}], [{"a": 3, "b": 1}, {"a": 3}]):
        assert spectral_constants(spectra, ranks) == pytest.approx((0, 0), abs=1e-24)


def test_only_the_first_is_left_when_all_truncate_alike() -> None:
    kappas = spectral_constants({"a": torch.tensor([4.0, 3.0, 2.0])}, [{"a": 1}] * 3)
    assert kappas == pytest.approx((3**2 + 2**2, 0.0), rel=1e-12, abs=1e-24)


def test_the_worst_layer_counts() -> None:
    spectra = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([4.0, 2.0])}
    ranks = [{"a": 1, "b": 1}, {}]
    assert spectral_constants(spectra, ranks) == spectral_constants({"b": spectra["b"]}, ranks)


def test_largest_norm() -> None:
    assert largest_norm([torch.tensor([3.0, 4.0]), torch.eye(4)]) == 5
    assert largest_norm([]) == 0


@pytest.mark.parametrize("ranks", [[{}, {"a": 2}, {"a": 1}], [{"a": 2}, {"a": 1}], [{}, {}]])
def test_a_tail_that_is_known_by_its_energy(ranks: list[dict[str, int]]) -> None:
    """κ_σ1 comes out the same; κ_σ2 is not underestimated, and is the same where the tail is flat."""
    whole = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.5])
    for spectrum in (whole, torch.tensor([4.0, 3.0, 2.0, 0.5, 0.5])):
        tails = {"a": Tail(2, spectrum[3:].square().sum().item())}
        exact = spectral_constants({"a": spectrum}, ranks)
        known = spectral_constants({"a": spectrum[:3]}, ranks, tails)
        assert known[0] == pytest.approx(exact[0], rel=1e-12)
        assert known[1] >= exact[1] * (1 - 1e-12)
    assert known[1] == pytest.approx(exact[1], rel=1e-12)
