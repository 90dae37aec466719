"""How FedHM's factorized layers start: whole, at the smallest tier's rank, or raised at that rank."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedhm.lowrank.svd import factorize, looks_untrained, unroll
from fedhm.methods.fedhm import FedHM, FedHMConfig, FedHMState
from fedhm.networks.exchange import exchanged_tensors


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))


def with_normalisation_between(norm: Callable[[], nn.Module]) -> nn.Sequential:
    """Return a network with one hidden layer before its last normalisation layer, and one behind it."""
    torch.manual_seed(0)
    before = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), norm(), nn.ReLU()]
    return nn.Sequential(*before, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))


def begun(model: nn.Module, **config: object) -> FedHMState:
    return FedHM(model, FedHMConfig.model_validate({"tiers": [1, 1 / 4, 1 / 8], **config})).start(
        exchanged_tensors(model)
    )


def rank(weight: torch.Tensor) -> int:
    return int(torch.linalg.matrix_rank(unroll(weight), rtol=1e-4))


def test_at_the_smallest_rank_the_other_directions_can_be_learnt() -> None:
    state = begun(perceptron(), start="smallest")
    assert rank(state.weights["2.weight"]) == 8
    product = state.factors["2"].left @ state.factors["2"].right
    torch.testing.assert_close(product, unroll(state.weights["2.weight"]))
    assert bool((state.factors["2"].left.norm(dim=0) > 0).all())  # with both factors at 0 there is no gradient


def is_raised(state: FedHMState, layer: str, before: torch.Tensor) -> bool:
    """Tell whether the first eight directions have the norm of the whole layer, and the others are as they were."""
    U, spectrum, Vt = torch.linalg.svd(unroll(before), full_matrices=False)
    factor = spectrum.norm() / spectrum[:8].norm()
    raised = torch.cat([spectrum[:8] * factor, spectrum[8:]])
    return torch.allclose(unroll(state.weights[f"{layer}.weight"]), U @ torch.diag(raised) @ Vt, atol=1e-5)


@pytest.mark.parametrize("form", ["spatial", "pufferfish"])
def test_raised_layers_carry_their_norm_at_the_smallest_rank(form: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.LazyLinear(5))
    model(torch.randn(1, 3, 8, 8))
    before = model[1].weight.detach()
    method = FedHM(model, FedHMConfig.model_validate({"tiers": [1, 1 / 4, 1 / 8], "start": "raised", "form": form}))
    state = method.start(exchanged_tensors(model))
    smallest = state.factors["1"].prefix(state.plans["1/8"].ranks["1"])
    torch.testing.assert_close((smallest[0] @ smallest[1]).norm(), before.norm())
    # the decomposition is that of the raised weight, and what lies beyond the smallest rank is as it was
    again = factorize(unroll(state.weights["1.weight"], method.config.form), 8)
    torch.testing.assert_close(again.spectrum, state.factors["1"].spectrum)
    largest = state.factors["1"].left @ state.factors["1"].right
    torch.testing.assert_close(again.left @ again.right, largest, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(64), lambda: nn.BatchNorm1d(64), lambda: nn.RMSNorm(64)])
def test_by_default_only_layers_that_no_normalisation_follows_are_raised(norm: Callable[[], nn.Module]) -> None:
    model = with_normalisation_between(norm)
    first, last = model[2].weight.detach(), model[5].weight.detach()
    state = begun(model)
    assert torch.equal(state.weights["2.weight"], first)
    assert is_raised(state, "5", last)
    assert is_raised(begun(model, start="raised"), "2", first)


def test_a_network_that_ends_in_normalised_layers_starts_whole() -> None:
    model = nn.Sequential(*with_normalisation_between(lambda: nn.LayerNorm(64))[:5], nn.Linear(64, 5))
    state = begun(model)
    assert "2" in state.factors
    assert all(torch.equal(state.weights[name], tensor) for name, tensor in exchanged_tensors(model).items())


def test_only_untrained_models_that_are_averaged_by_bands_are_raised_by_default() -> None:
    untrained = perceptron()
    weight = untrained[2].weight.detach()
    assert is_raised(begun(untrained), "2", weight)
    for whole in ({"aggregate": "models"}, {"start": "whole"}, {"warmup": 1}):
        assert torch.equal(begun(untrained, **whole).weights["2.weight"], weight)


def test_a_trained_model_is_not_raised() -> None:
    model = perceptron()
    inputs, labels = torch.randn(256, 32), torch.arange(256) % 5
    inputs[:, 0] += 3.0 * labels  # a direction to learn
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    state = begun(model)
    assert torch.equal(state.weights["2.weight"], model[2].weight)


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.integers(16, 80),
    inputs=st.integers(16, 80),
    seed=st.integers(0, 2**31),
    make=st.sampled_from([nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.orthogonal_]),
)
def test_common_initialisations_look_untrained(
    outputs: int, inputs: int, seed: int, make: Callable[..., object]
) -> None:
    torch.manual_seed(seed)
    weight = torch.empty(outputs, inputs)
    make(weight)
    assert looks_untrained(weight, factorize(unroll(weight), 1).spectrum)
    learnt = weight + 5 * torch.linalg.matrix_norm(weight, 2) * torch.outer(
        nn.functional.normalize(torch.randn(outputs), dim=0), nn.functional.normalize(torch.randn(inputs), dim=0)
    )
    assert not looks_untrained(learnt, factorize(unroll(learnt), 1).spectrum)


@pytest.mark.parametrize("shape", [(16, 8, 3, 3), (8, 16, 3)])
def test_convolutions_look_untrained(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    assert looks_untrained(weight, factorize(unroll(weight), 1).spectrum)


def test_recurrent_layers_are_raised_and_frozen_ones_are_not() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"lstm": nn.LSTM(32, 64, 2), "frozen": nn.Linear(64, 64), "hidden": nn.Linear(64, 64)})
    model["fc"] = nn.Linear(64, 5)
    model["frozen"].requires_grad_(False)
    state = begun(model)
    recurrent = [name for name in state.factors if name.startswith("lstm.")]
    assert len(recurrent) == 4
    for layer in [*recurrent, "hidden"]:
        weight = model.get_parameter(layer if layer != "hidden" else "hidden.weight").detach()
        left, right = state.factors[layer].prefix(state.plans["1/8"].ranks[layer])
        torch.testing.assert_close((left @ right).norm(), weight.norm())
    assert torch.equal(state.weights["frozen.weight"], model["frozen"].weight)
