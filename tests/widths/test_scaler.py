"""The scaler: where it acts, and a network that has it in its weights."""

import copy
import pickle

import torch
from torch import nn

from fedhm.networks.exchange import exchanged_tensors, load
from fedhm.widths.narrow import narrow_network
from fedhm.widths.plan import plan_widths
from fedhm.widths.wrappers import divide_weights, scaled_layers, with_scaler

SHARE = 0.5


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def test_the_scaler_divides_where_no_normalisation_follows_in_training_and_evaluation() -> None:
    full = model()
    plan = plan_widths(full, 0.5, torch.zeros(2, 4), "4")
    assert scaled_layers(plan) == {"2"}
    plain = narrow_network(full, plan)
    scaled = with_scaler(narrow_network(full, plan), plan, SHARE)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for mode in (True, False):
        plain.train(mode), scaled.train(mode)
        assert torch.equal(scaled[:2](x), plain[:2](x))  # type: ignore[index]
        assert torch.equal(scaled[:3](x), plain[:3](x) / SHARE)  # type: ignore[index]
        assert torch.equal(scaled[4](y), plain[4](y))  # type: ignore[index]


def test_without_a_normalisation_every_layer_but_the_classifier_is_scaled() -> None:
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 2))
    assert scaled_layers(plan_widths(network, 0.5, torch.zeros(1, 1, 6, 6), "4")) == {"0", "2"}


def test_divided_weights_compute_the_same_without_a_scaler() -> None:
    full = model().double()
    plan = plan_widths(full, 0.5, torch.zeros(2, 4).double(), "4")
    scaled = with_scaler(narrow_network(full, plan), plan, SHARE)
    plain = load(narrow_network(full, plan), divide_weights(exchanged_tensors(scaled), plan, SHARE))
    x = torch.randn(6, 4).double()
    for mode in (True, False):
        torch.testing.assert_close(plain.train(mode)(x), scaled.train(mode)(x), rtol=1e-12, atol=1e-12)


def test_a_scaled_network_can_be_copied_and_pickled() -> None:
    plan = plan_widths(model(), 0.5, torch.zeros(2, 4), "4")
    scaled = with_scaler(narrow_network(model(), plan), plan, SHARE).eval()
    x = torch.randn(6, 4)
    for twin in (copy.deepcopy(scaled), pickle.loads(pickle.dumps(scaled))):
        assert torch.equal(twin(x), scaled(x))
