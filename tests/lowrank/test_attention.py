"""Torch's own attention, and layers whose weights are used without calling them: handled, or dense with the reason."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedhm
from fedhm.lowrank.hybrid import to_full, to_hybrid
from fedhm.lowrank.layers import LowRankLinear
from fedhm.lowrank.plan import plan_ranks

TIGHT = {"rtol": 0.0, "atol": 1e-10}
DENSE = "a MultiheadAttention, a type of layer that is not factorized"
USED = "a NonDynamicallyQuantizableLinear, whose owner may use its weight without calling it"


class Attending(nn.Module):
    """Attention between two layers that can be factorized."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, **options)
        self.after = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        given = x[..., : self.attention.kdim], x[..., : self.attention.vdim]
        y: Tensor = self.after(self.attention(x, *given, need_weights=False)[0])
        return y


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, x.flip(1))
        return y


class Functional(nn.Module):
    """One layer that is called, used as a matrix, and used the other way round; and one that is only used."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.used = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.called(x).tanh(), self.called.weight).tanh() @ self.called.weight
        return F.linear(x, self.used.weight, self.used.bias)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "factorized", "dense"),
    [
        (Attending, {"before", "after"}, {"attention": DENSE, "attention.out_proj": USED}),
        (lambda: Attending(kdim=8, vdim=4), {"before", "after"}, {"attention": DENSE, "attention.out_proj": USED}),
        (
            Decoder,
            {"layer.linear1", "layer.linear2"},
            {"layer.self_attn": DENSE, "layer.self_attn.out_proj": USED}
            | {"layer.multihead_attn": DENSE, "layer.multihead_attn.out_proj": USED},
        ),
        (Functional, {"called", "used"}, {}),
    ],
    ids=["attention", "attention of other sizes", "decoder", "functional"],
)
def test_the_rest_is_factorized_and_the_model_runs(
    make: Callable[[], nn.Module], factorized: set[str], dense: dict[str, str], training: bool
) -> None:
    torch.manual_seed(0)
    model = make().double().train(training)
    plan = plan_ranks(model, 1 / 4, keep=0, classifier=None)
    assert set(plan) == factorized
    assert plan.dense == dense
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(to_hybrid(model, dict.fromkeys(plan, 16))(x), model(x), **TIGHT)
            hybrid, full = to_hybrid(model, plan), copy.deepcopy(model)
            assert (hybrid(x) - model(x)).abs().max() > 1e-4
            full.load_state_dict(to_full(hybrid), strict=True)
            torch.testing.assert_close(hybrid(x), full(x), **TIGHT)
    hybrid(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for name, p in hybrid.named_parameters() if name[-1] in "uv")


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_run_trains_torchs_encoder(batch_first: bool) -> None:
    """Clients train it, which calls its layers, and the server evaluates it by the fast path, which uses weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=batch_first)
    model = nn.Sequential(
        nn.Linear(4, 16), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), nn.Linear(48, 3)
    )
    labels = torch.arange(30) % 3
    x = torch.randn(30, 3, 4) + F.one_hot(labels, 4)[:, None]
    settings = {
        "method": {"tiers": [1, "1/4"]},
        "train": {"rounds": 3, "batch": 10, "lr": 0.01, "optimizer": "adamw"},
        "federation": {"participation": 1.0},
        "engine": {"workers": 1, "threads": 1},
    }
    result = fedhm.run(model, [(x, labels)] * 2, (x, labels), settings)
    small = result.networks["1/4"]
    assert isinstance(small.get_submodule("1.layers.0.linear1"), LowRankLinear)
    for tier in ("full", "1/4"):
        assert result.records[-1].traffic[tier].loss < result.records[0].traffic[tier].loss
