import copy

import pytest
import torch
from torch import nn

from fedhm.lowrank.decay import add_frobenius_decay, low_rank_layers
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.layers import LowRank
from fedhm.lowrank.plan import RankPlan
from fedhm.networks.structure import channels_last

STRENGTH = 0.3


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Conv2d(3, 5, (3, 2), stride=2),
        nn.BatchNorm2d(5),
        nn.Flatten(),
        nn.Linear(5 * 3 * 3, 6),
        nn.Linear(6, 4),
    ).double()


def backward(model: nn.Module) -> None:
    model(torch.randn(3, 2, 7, 7, dtype=torch.float64)).square().sum().backward()


@pytest.fixture(params=["spatial", "pufferfish"])
def hybrid(request: pytest.FixtureRequest) -> nn.Module:
    model = to_hybrid(network(), RankPlan({"1": 3, "4": 2}, request.param))
    backward(model)
    return model


def test_decay_is_the_gradient_of_the_products_norm(hybrid: nn.Module) -> None:
    expected = {}
    for name, layer in hybrid.named_modules():
        if isinstance(layer, LowRank):
            norm = STRENGTH / 2 * layer.weight.square().sum()
            for part, gradient in zip("uv", torch.autograd.grad(norm, [layer.u, layer.v]), strict=True):
                expected[f"{name}.{part}"] = getattr(layer, part).grad + gradient
                assert gradient.norm() > 1e-3
    add_frobenius_decay(low_rank_layers(hybrid), STRENGTH)
    parameters = dict(hybrid.named_parameters())
    assert set(expected) == {"1.u", "1.v", "4.u", "4.v"}
    for name, gradient in expected.items():
        torch.testing.assert_close(parameters[name].grad, gradient, rtol=0, atol=1e-12)


def test_everything_else_is_left_alone(hybrid: nn.Module) -> None:
    before = {name: p.grad.clone() for name, p in hybrid.named_parameters()}
    weights = {name: p.detach().clone() for name, p in hybrid.named_parameters()}
    add_frobenius_decay(low_rank_layers(hybrid), STRENGTH)
    for name, p in hybrid.named_parameters():
        assert torch.equal(p.detach(), weights[name])
        assert torch.equal(p.grad, before[name]) == (name not in {"1.u", "1.v", "4.u", "4.v"})


def test_dense_network_has_no_decay() -> None:
    model = network()
    backward(model)
    before = [p.grad.clone() for p in model.parameters()]
    add_frobenius_decay(low_rank_layers(model), STRENGTH)
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))


def test_missing_gradients_stay_missing(hybrid: nn.Module) -> None:
    hybrid.zero_grad()
    add_frobenius_decay(low_rank_layers(hybrid), STRENGTH)
    assert all(p.grad is None for p in hybrid.parameters())


def test_frozen_layer_stays_frozen() -> None:
    hybrid = to_hybrid(network(), {"1": 3, "4": 2})
    hybrid[1].requires_grad_(False)
    backward(hybrid)
    add_frobenius_decay(low_rank_layers(hybrid), STRENGTH)
    assert hybrid[1].u.grad is None
    assert hybrid[1].v.grad is None
    assert hybrid[4].u.grad is not None


def test_strength_zero_changes_nothing(hybrid: nn.Module) -> None:
    before = [p.grad.clone() for p in hybrid.parameters()]
    add_frobenius_decay(low_rank_layers(hybrid), 0.0)
    assert all(torch.equal(p.grad, old) for p, old in zip(hybrid.parameters(), before, strict=True))


def test_a_shared_layer_decays_once() -> None:
    layer = nn.Linear(5, 5, dtype=torch.float64)
    hybrid = to_hybrid(nn.Sequential(layer, nn.ReLU(), layer), {"0": 2})
    hybrid(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    hybrid.zero_grad(set_to_none=False)
    add_frobenius_decay(low_rank_layers(hybrid), 1.0)
    norm = hybrid[0].weight.square().sum() / 2
    torch.testing.assert_close(hybrid[0].u.grad, torch.autograd.grad(norm, hybrid[0].u)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", ["spatial", "pufferfish"])
def test_memory_format_does_not_matter(form: str) -> None:
    plain = to_hybrid(network(), RankPlan({"1": 3, "4": 2}, form))
    turned = channels_last(copy.deepcopy(plain))
    inputs = torch.randn(3, 2, 7, 7, dtype=torch.float64)
    for model, images in ((plain, inputs), (turned, inputs.to(memory_format=torch.channels_last))):
        model(images).square().sum().backward()
        before = {name: p.grad.stride() for name, p in model.named_parameters()}
        add_frobenius_decay(low_rank_layers(model), STRENGTH)
        assert {name: p.grad.stride() for name, p in model.named_parameters()} == before
    assert turned[1].v.grad.stride() != plain[1].v.grad.stride()
    for p, q in zip(plain.parameters(), turned.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-10)
