"""How FedHM's factorized layers start: whole, at the smallest tier's rank, or scaled to the norm that they had."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conftest import small_model
from fedhm.lowrank.svd import factorize, looks_untrained, unroll
from fedhm.methods.fedhm import FedHM, FedHMConfig, FedHMState
from fedhm.networks.exchange import exchanged_tensors


def perceptron(*between: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [nn.Linear(32, 64), *(make() for make in between), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, 5))


def begun(model: nn.Module, **config: object) -> FedHMState:
    return FedHM(model, FedHMConfig.model_validate({"tiers": [1, 1 / 4, 1 / 8], **config})).start(
        exchanged_tensors(model)
    )


def rank(weight: torch.Tensor) -> int:
    return int(torch.linalg.matrix_rank(unroll(weight), rtol=1e-4))


def test_scaled_layers_have_the_smallest_rank_and_the_norm_they_had() -> None:
    model = perceptron()
    state = begun(model, start="scaled")
    assert rank(state.weights["2.weight"]) == 8
    torch.testing.assert_close(state.weights["2.weight"].norm(), model[2].weight.detach().norm())
    product = state.factors["2"].left @ state.factors["2"].right
    torch.testing.assert_close(product, unroll(state.weights["2.weight"]))
    # one factor of every direction beyond is not 0: it can be learnt
    assert bool((state.factors["2"].left.norm(dim=0) > 0).all())


def test_only_untrained_models_without_normalisation_are_cut_by_default() -> None:
    untrained = perceptron()
    assert rank(begun(untrained).weights["2.weight"]) == 8
    for kept in (perceptron(lambda: nn.LayerNorm(64)), small_model()):
        state = begun(kept)
        assert all(torch.equal(state.weights[name], tensor) for name, tensor in exchanged_tensors(kept).items())
    for whole in ({"aggregate": "models"}, {"start": "whole"}, {"warmup": 1}):
        assert rank(begun(untrained, **whole).weights["2.weight"]) == 64


def test_a_trained_model_is_not_cut() -> None:
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
