"""The recovered change of a network, by way of its factors: its norm, and shorter changes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedhm.lowrank.delta import factorized_delta, inner_product
from fedhm.lowrank.svd import to_matrix_factors


def tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    """A factorized convolution and Linear layer, a dense weight, and a counter."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    return {
        "conv.u": draw(3, 4, 3, 1),
        "conv.v": draw(6, 3, 1, 3),
        "line.u": draw(2, 5),
        "line.v": draw(7, 2),
        "line.bias": draw(7),
        "norm.weight": draw(6),
        "norm.num_batches_tracked": torch.tensor(seed),
    }


def recovered(network: dict[str, Tensor]) -> Tensor:
    """All weights of the network as one vector, formed densely."""
    products = [
        torch.mm(*(m.double() for m in to_matrix_factors(network[f"{n}.u"], network[f"{n}.v"])))
        for n in ("conv", "line")
    ]
    dense = [network[name].double() for name in ("line.bias", "norm.weight")]
    return torch.cat([tensor.flatten() for tensor in products + dense])


def doubles(network: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in network.items()}


LAYERS = ("conv", "line")


@given(st.integers(0, 10_000), st.floats(1e-3, 30))
def test_the_norm_is_that_of_the_recovered_change(seed: int, scale: float) -> None:
    sent, returned = tensors(seed), tensors(seed + 1, scale)
    expected = (recovered(returned) - recovered(sent)).norm().item()
    assert factorized_delta(returned, sent, LAYERS).norm == pytest.approx(expected, rel=1e-6)


@given(st.integers(0, 10_000), st.floats(1e-3, 0.999))
def test_a_shorter_change_is_as_long_as_it_may_be(seed: int, share: float) -> None:
    sent, returned = doubles(tensors(seed)), doubles(tensors(seed + 1))  # float32 rounds short ways
    whole = factorized_delta(returned, sent, LAYERS)
    length = share * whole.norm
    cut = whole.clipped(length)
    assert (recovered(cut) - recovered(sent)).norm().item() == pytest.approx(length, rel=1e-9)
    assert cut["norm.num_batches_tracked"] == returned["norm.num_batches_tracked"]
    assert {name: t.shape for name, t in cut.items()} == {name: t.shape for name, t in sent.items()}


def test_what_is_short_enough_stays_as_it_was() -> None:
    sent, returned = tensors(0), tensors(1)
    whole = factorized_delta(returned, sent, LAYERS)
    kept = whole.clipped(whole.norm)
    assert all(torch.equal(kept[name], returned[name]) for name in returned)


def test_nothing_is_left_of_a_change_that_may_have_no_length() -> None:
    sent = tensors(0)
    kept = factorized_delta(tensors(1), sent, LAYERS).clipped(0.0)
    assert torch.allclose(recovered(kept), recovered(sent), rtol=0, atol=1e-6)


def test_dense_changes_are_scaled() -> None:
    sent, returned = {"w": torch.zeros(4)}, {"w": torch.full((4,), 5.0)}
    assert factorized_delta(returned, sent, ()).clipped(1.0)["w"].tolist() == pytest.approx([0.5] * 4)


def test_what_is_left_out_counts_as_unchanged() -> None:
    sent, returned = tensors(0), tensors(1)
    only = {name: sent[name] if name in ("line.bias", "norm.weight") else t for name, t in returned.items()}
    left_out = factorized_delta(returned, sent, LAYERS, {"line.bias", "norm.weight"})
    assert left_out.norm == pytest.approx((recovered(only) - recovered(sent)).norm().item())


def test_numbers_of_16_bits_and_complex_ones() -> None:
    sent, returned = {"w": torch.zeros(70_000).half()}, {"w": torch.ones(70_000).half()}
    assert factorized_delta(returned, sent, ()).norm == pytest.approx(70_000**0.5)
    assert factorized_delta({"w": torch.tensor([3 + 4j])}, {"w": torch.tensor([0j])}, ()).norm == pytest.approx(5)


@given(st.integers(0, 10_000))
def test_inner_products_need_nothing_dense(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b, c, d = (torch.randn(*s, generator=generator).double() for s in ((6, 2), (2, 5), (6, 3), (3, 5)))
    assert inner_product((a, b), (c, d)) == pytest.approx(((a @ b) * (c @ d)).sum().item(), abs=1e-9)


def test_a_change_too_long_to_be_computed_is_not_a_short_one() -> None:
    sent = doubles(tensors(0))
    whole = factorized_delta({name: tensor * 1e200 for name, tensor in sent.items()}, sent, LAYERS)
    assert not whole.norm <= 1e300
    assert whole.fraction_at(1.0) == 0


@given(st.integers(0, 10_000), st.floats(1.001, 4.0))
def test_a_longer_change_goes_on_the_same_way(seed: int, factor: float) -> None:
    sent, returned = tensors(seed), tensors(seed + 1)
    whole = factorized_delta(returned, sent, LAYERS)
    longer = whole.scaled_to(factor * whole.norm)
    assert longer.norm == pytest.approx(factor * whole.norm, rel=1e-9)
    assert (recovered(dict(longer.returned)) - recovered(sent)).norm().item() == pytest.approx(longer.norm, rel=1e-5)


def test_of_no_change_there_is_no_longer_one() -> None:
    sent = tensors(0)
    assert factorized_delta(tensors(0), sent, LAYERS).scaled_to(1.0).norm == 0.0


def test_sums_have_one_order_whatever_that_of_the_layers() -> None:
    """A set of names is in another order in every process."""
    sent, returned = ({f"{n}.{part}": t for n in "abcdefgh" for part, t in drawn(n, seed)} for seed in (0, 1))
    norms = {factorized_delta(returned, sent, order).norm for order in ("abcdefgh", "hgfedcba", "dbfhaceg", "gcahebdf")}
    assert len(norms) == 1


def drawn(layer: str, seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed * 1000 + ord(layer))
    return [("u", torch.randn(2, 5, generator=generator)), ("v", torch.randn(7, 2, generator=generator))]
