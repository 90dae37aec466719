"""The small vision transformer: what is factorized, that it learns, and what it is not for."""

from typing import Any

import pytest
import torch
from torch import nn

import fedhm
from fedhm.errors import FedhmError
from fedhm.lowrank.plan import plan_ranks
from fedhm.models import vit
from fedhm.networks.saving import find_blocks
from fedhm.networks.structure import reinitialise

SMALL: dict[str, Any] = {"width": 0.25, "depth": 2, "patch": 2, "image": (8, 8)}
CHANGES = [
    "model.name=vit", "model.width=0.25", "model.depth=2", "model.patch=2", "data.train_samples=600",
    "federation.clients=4", "federation.participation=1", "train.rounds=3", "train.epochs=3", "train.batch=32",
    "train.optimizer=adamw", "train.lr=0.01", "train.milestones=[]", "evaluation.every=3", "engine.workers=1",
]  # fmt: skip


def test_all_of_attention_and_mlp_is_factorized_and_the_rest_has_a_reason() -> None:
    model = vit(10, 1, **SMALL)
    plan = plan_ranks(model, 1 / 4)
    layers = ("attention.query", "attention.key", "attention.value", "attention.out", "up", "down")
    assert plan == {f"blocks.{block}.{layer}": 8 for block in (0, 1) for layer in layers}
    assert plan.dense == {
        "patches": "among the first 1 layers",
        "positions": "all of its rows are added to every image",
        "fc": "the classifier",
    }
    model, x = model.double().eval(), torch.rand(3, 1, 8, 8, dtype=torch.float64)
    whole = fedhm.to_hybrid(model, dict.fromkeys(plan, 32))
    torch.testing.assert_close(whole(x), model(x), rtol=0, atol=1e-10)
    hybrid = fedhm.to_hybrid(model, plan)
    shortened = hybrid(x)
    model.load_state_dict(fedhm.to_full(hybrid), strict=True)
    torch.testing.assert_close(model(x), shortened, rtol=0, atol=1e-10)


def test_its_size_follows_from_width_depth_and_patch() -> None:
    def size(**changes: Any) -> int:
        return sum(p.numel() for p in vit(10, 1, **SMALL | changes).parameters())

    features, patches = 32, 16
    block = 12 * features**2 + 13 * features  # 4 + 8 matrices, their biases, two norms of two vectors
    outside = 4 * features + features + patches * features + 2 * features + 10 * features + 10
    assert size() == 2 * block + outside
    assert size(depth=5) == 5 * block + outside
    assert size(patch=4) == size()  # 12 positions less, and patches of 12 pixels more
    assert size(patch=4, depth=1, image=(16, 8)) == block + outside + (16 - 4 + 8 - 16) * features
    assert find_blocks(vit(10, 1, **SMALL)) == ["blocks.0", "blocks.1"]


def test_patches_and_positions_are_where_they_should_be() -> None:
    model = vit(3, 2, width=1 / 8, depth=1, patch=2, image=(4, 6))
    assert model.positions.num_embeddings == 6
    x = torch.rand(1, 2, 4, 6)
    for place, (row, column) in enumerate((row, column) for row in (0, 2) for column in (0, 2, 4)):
        patch = torch.einsum("oihw,ihw->o", model.patches.weight, x[0, :, row : row + 2, column : column + 2])
        seen = model.patches(x).flatten(2).transpose(1, 2)[0, place]
        torch.testing.assert_close(seen, patch + model.patches.bias)
    swapped = x[..., [2, 3, 0, 1, 4, 5]]
    assert (model(x) - model(swapped)).abs().max() > 1e-5
    nn.init.zeros_(model.positions.weight)  # without positions it cannot tell where a patch was
    torch.testing.assert_close(model(x), model(swapped))


def test_positions_are_drawn_small_also_anew() -> None:
    for model in (vit(10, 1, **SMALL), reinitialise(vit(10, 1, **SMALL))):
        assert 0.01 < model.get_parameter("positions.weight").std() < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "{tiers=[1, '1/4']}",
        "{tiers=['1/4'], aggregate='models', start='whole'}",  # "lowrank" in comparisons
        "{name='fedavg'}",
        "{name='feddlr'}",
        "{name='fedpara'}",
    ],
)
def test_it_learns_digits(method: str) -> None:
    result = fedhm.prepare(fedhm.load_config("digits", [*CHANGES, f"method={method}"])).run()
    for tier, metrics in result.metrics.items():
        assert metrics.accuracy > 0.25, (tier, metrics)


@pytest.mark.parametrize("name", ["heterofl", "fjord", "fedrolex", "splitmix"])
def test_methods_of_width_refuse_it_in_a_sentence(name: str) -> None:
    config = fedhm.load_config("digits", [*CHANGES, f"method={{name='{name}'}}"])
    with pytest.raises(FedhmError, match="the model cannot be made narrower: 'positions' is a Embedding"):
        fedhm.prepare(config)


@pytest.mark.parametrize(
    ("preset", "changes", "sentence"),
    [
        ("digits", ["model.name=vit", "model.patch=3"], "model.patch = 3 does not divide images of 8×8 pixels"),
        ("diabetes", ["model.name=vit"], r"model.name = 'vit' is for images, not for inputs of shape \(10,\)"),
        ("digits", ["model.depth=3"], "depth and patch are settings of name = 'vit'"),
        ("digits", ["model.name=vit", "model.depth=0"], "model.depth"),
        ("digits", ["model.name=vit", "model.width=10000"], "model.width = 10000 and model.depth = 6 makes a model of"),
    ],
)
def test_what_cannot_be_is_said(preset: str, changes: list[str], sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        fedhm.prepare(fedhm.load_config(preset, changes))


@pytest.mark.slow
def test_workers_and_checkpointing_change_no_bit() -> None:
    short = [*CHANGES, "train.epochs=1", "train.rounds=1", "data.train_samples=64", "method={tiers=[1, '1/4']}"]
    plain, other = (
        fedhm.prepare(fedhm.load_config("digits", short + more)).run().networks
        for more in ([], ["engine.workers=2", "train.checkpointing=true"])
    )
    for tier, network in plain.items():
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, other[tier].state_dict()[name]), (tier, name)
