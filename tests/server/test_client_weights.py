"""`federation.weights`: how much each client counts in the mean."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhm
from fedhm.data.federation import Federation
from small import small_model

X, Y = torch.randn(20, 5), torch.arange(20) % 3
CLIENTS = [(X[i::2] + i, Y[i::2]) for i in range(2)]


def trained(method: Any, clients: Any, weights: list[float] | None = None) -> dict[str, Tensor]:
    federation: dict[str, Any] = {"participation": 1.0, **({"weights": weights} if weights else {})}
    config = {"federation": federation, "train": {"rounds": 1, "masked_loss": False}, "engine": {"threads": 1}}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3))
    return fedhm.run(model, clients, (X, Y), {**config, "method": method}).networks["full"].state_dict()


@pytest.mark.parametrize("method", [{"name": "fedavg"}, {"name": "fedhm", "tiers": [1], "aggregate": "models"}])
def test_the_mean_is_weighted(method: dict[str, Any]) -> None:
    """Weights 3 and 1 give three parts of the way from one extreme to the other."""
    alike, first, second = (trained(method, CLIENTS, w) for w in (None, [1.0, 1e-9], [1e-9, 1.0]))
    weighted, equal = trained(method, CLIENTS, [3.0, 1.0]), trained(method, CLIENTS, [2.0, 2.0])
    for name in alike:
        torch.testing.assert_close(equal[name], alike[name])
        torch.testing.assert_close(weighted[name], 0.75 * first[name] + 0.25 * second[name], rtol=1e-4, atol=1e-6)
        assert not torch.allclose(first[name], second[name])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"method": {"name": "fedmd"}}, "method.name = 'fedmd' counts all clients alike"),
        ({"server": {"robust": "median"}, "method": {"name": "fedavg"}}, "server.robust = 'median' counts all clients"),
    ],
)
def test_settings_that_would_not_use_them(federation: Federation, settings: dict[str, Any], sentence: str) -> None:
    config, public = {"federation": {"weights": [1.0] * 8}, **settings}, federation.test.tensor
    with pytest.raises(fedhm.FedhmError, match=sentence):
        fedhm.run(small_model(), federation.clients, federation.test, config, public=public)
