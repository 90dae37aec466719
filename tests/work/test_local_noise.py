"""Clients that do not trust their server: what they send is bounded and noisy before it leaves them."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from conftest import small_model
from fedhm.config.schema import PrivacyConfig, TrainConfig
from fedhm.data.samples import Preprocessing, Samples
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.networks.exchange import exchanged_tensors
from fedhm.networks.reuse import NetworkPool
from fedhm.networks.spec import NetworkSpec
from fedhm.seeds import Secret
from fedhm.work.client import Client, LocalNoise
from fedhm.work.messages import Failure, Task

CLIP = 0.2


def client(network: nn.Module, noise: float, secret: bytes = b"s" * 32, **train: object) -> Client:
    inputs = torch.randn(20, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    settings = TrainConfig.model_validate({"batch": 5, "lr": 0.1, "masked_loss": False, **train})
    hidden = LocalNoise(PrivacyConfig(clip=CLIP, noise=noise, where="client"), Secret(secret))
    networks = NetworkPool(lambda _: copy.deepcopy(network))
    return Client(Samples(inputs, torch.arange(20) % 4), Preprocessing(), networks, settings, 3, noise=hidden)


def task(network: nn.Module, **changes: object) -> Task:
    base = Task(
        "train", 1, 0, "1/2", NetworkSpec("1/2"), {name: t.clone() for name, t in exchanged_tensors(network).items()}
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def network() -> nn.Module:
    hybrid = to_hybrid(small_model(), {"3": 4, "7": 4})
    hybrid.register_buffer("mask", torch.full((3,), -1e9))
    hybrid[0].bias.requires_grad_(False)
    return hybrid


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


@pytest.mark.parametrize(("lr", "length"), [(0.1, CLIP), (1e6, 0.0)])
def test_what_travels_changes_by_the_bound_at_most(lr: float, length: float) -> None:
    """Factors are bounded as they travel; of a client whose training gives NaN, nothing is left."""
    sent = task(network())
    update = client(network(), 0.0, lr=lr).run(sent)
    changed = (flat(update.tensors) - flat(sent.tensors)).norm().item()
    assert changed <= CLIP
    assert changed == pytest.approx(length, rel=1e-5)


def test_every_number_that_is_trained_gets_noise() -> None:
    sent = task(network())
    bare, noisy = (client(network(), noise).run(sent) for noise in (0.0, 5.0))
    untouched = {"mask", "0.bias"}
    assert all(torch.equal(noisy.tensors[name], sent.tensors[name]) for name in untouched)
    rest = [name for name in sent.tensors if name not in untouched and not name.endswith("running_var")]
    noise = torch.cat([(noisy.tensors[name] - bare.tensors[name]).double().flatten() for name in rest])
    assert (noise != 0).all()
    assert noise.mean().item() == pytest.approx(0, abs=4 * 5 * CLIP / len(noise) ** 0.5)
    assert noise.std().item() == pytest.approx(5 * CLIP, rel=4 / (2 * len(noise)) ** 0.5)
    assert noisy.tensors["1.running_var"].min() >= 0


def test_statistics_that_stay_are_sent_back_as_they_came() -> None:
    sent = task(network())
    update = client(network(), 5.0, frozen_statistics=True).run(sent)
    running = [name for name in sent.tensors if "running" in name]
    assert running
    assert all(torch.equal(update.tensors[name], sent.tensors[name]) for name in running)


def test_the_loss_is_not_told() -> None:
    assert client(network(), 1.0).run(task(network())).loss == 0


def test_noise_follows_from_the_secret_the_round_and_the_client() -> None:
    sent = task(network())
    first = flat(client(network(), 1.0).run(sent).tensors)
    assert torch.equal(first, flat(client(network(), 1.0).run(sent).tensors))
    for other in (
        client(network(), 1.0, b"t" * 32).run(sent),
        client(network(), 1.0).run(replace(sent, round=2)),
        client(network(), 1.0).run(replace(sent, client=1)),
    ):
        assert not torch.allclose(first, flat(other.tensors), atol=CLIP)


def test_without_a_secret_noise_is_another_each_time() -> None:
    sent = task(network())
    first, second = (flat(client(network(), 1.0, secret=b"").run(sent).tensors) for _ in range(2))
    assert not torch.allclose(first, second, atol=CLIP)


@pytest.mark.parametrize(
    ("kind", "train", "reason"),
    [
        ("statistics", {}, "it sends only networks that it has added noise to"),
        ("train", {"masked_loss": True}, "the labels that it holds"),
    ],
)
def test_nothing_else_leaves_the_client(kind: str, train: dict[str, object], reason: str) -> None:
    reply = client(network(), 1.0, **train).reply(task(network(), kind=kind))
    assert isinstance(reply, Failure)
    assert reason in reply.reason
