"""Networks of Conv1d layers in every method that factorizes or narrows them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhm
from fedhm.lowrank.layers import LowRankConv1d


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 12, 5, padding=2), nn.ReLU(), nn.Conv1d(12, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv1d(16, 16, 3, padding=2, dilation=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def waves(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return two channels of waves, whose frequency is their label."""
    generator = torch.Generator().manual_seed(seed)
    labels, time = torch.arange(count) % 3, torch.arange(20) / 20
    phase = torch.rand(count, 2, 1, generator=generator)
    clean = torch.sin(2 * torch.pi * ((1 + 2 * labels[:, None, None]) * time + phase))
    return clean + 0.1 * torch.randn(count, 2, 20, generator=generator), labels


@pytest.mark.parametrize(
    "method",
    [
        {"tiers": [1, "1/4"]},
        {"tiers": [1, "1/4"], "aggregate": "models", "start": "whole"},
        {"tiers": [1, "1/4"], "aggregate": "updates", "form": "pufferfish"},
        {"tiers": [1, "parameters:1400"]},
        {"name": "feddlr"},
        {"name": "fedpara"},
        {"name": "heterofl", "tiers": [1, 0.5]},
    ],
    ids=lambda method: " ".join(map(str, method.values())),
)
def test_signals_are_learnt(method: dict[str, Any]) -> None:
    settings = {
        "method": method,
        "train": {"rounds": 5, "epochs": 4, "batch": 8, "lr": 0.01, "optimizer": "adamw"},
        "federation": {"participation": 1.0},
        "engine": {"workers": 1, "threads": 1},
    }
    result = fedhm.run(network(), [waves(30, seed) for seed in range(4)], waves(60, 99), settings)
    for tier, metrics in result.metrics.items():
        assert metrics.accuracy > 0.6, (tier, metrics)
    if not {"name", "form"} & method.keys():
        small = list(result.networks.values())[-1]
        assert isinstance(small[2], LowRankConv1d)
        model, x = network(), waves(6, 5)[0]
        model.load_state_dict(fedhm.to_full(small), strict=True)
        torch.testing.assert_close(model(x), small(x))


def test_training_a_tier_is_measured_and_fitted() -> None:
    fit = fedhm.fit(network(), (2, 20), batch=8, keep=1, parameters=1000)
    assert fit.expected.parameters <= 1000 < fedhm.measure(network(), (2, 20)).parameters
    assert any(layer in fit.plan for layer in ("2", "4"))
