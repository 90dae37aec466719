"""Our steps of SGD are those of torch's optimizer, to the last bit."""

import copy

import pytest
import torch
from torch import nn

from fedhm.networks.sgd import SGD, ParameterGroup


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.8, "dampening": 0.3},
        {"momentum": 0.8, "nesterov": True},
    ],
    ids=str,
)
def test_it_steps_as_torchs_own(settings: dict[str, float], fused: bool | None) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    network.register_parameter("unused", nn.Parameter(torch.ones(2)))  # it never has a gradient
    twin = copy.deepcopy(network)
    first, *others = network.parameters()
    ours = SGD([ParameterGroup([first], 0.1), ParameterGroup(others)], 0.05, fused=fused, **settings)  # type: ignore[arg-type]
    first, *others = twin.parameters()
    groups = [{"params": [first], "weight_decay": 0.1}, {"params": others}]
    theirs = torch.optim.SGD(groups, lr=0.05, fused=fused, **settings)  # type: ignore[arg-type]
    for _ in range(4):
        inputs = torch.randn(6, 5)
        for model, optimizer in ((network, ours), (twin, theirs)):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    for mine, other in zip(network.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_sparse_gradients_step_too() -> None:
    network = nn.EmbeddingBag(9, 4, sparse=True)
    twin = copy.deepcopy(network)
    for model, optimizer in (
        (network, SGD([ParameterGroup(list(network.parameters()))], 0.1)),
        (twin, torch.optim.SGD(twin.parameters(), lr=0.1)),
    ):
        model(torch.tensor([[1, 2], [3, 1]])).sum().backward()
        optimizer.step()
    assert torch.equal(network.weight, twin.weight)
