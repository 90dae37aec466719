"""Local training is plain SGD on the client's own samples, and depends on nothing but its task."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhm.config.schema import TrainConfig
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.networks.exchange import Tensors, exchanged_tensors
from fedhm.networks.reuse import NetworkPool
from fedhm.networks.spec import NetworkSpec
from fedhm.objectives.classification import masked_cross_entropy
from fedhm.seeds import torch_generator
from fedhm.work.client import Client
from fedhm.work.messages import Task
from fedhm.work.train import check_optimizer


def samples() -> Samples:
    generator = torch.Generator().manual_seed(0)
    return Samples(torch.randn(22, 6, generator=generator), torch.arange(22) % 3)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 4))


def client(network: nn.Module, **train: object) -> Client:
    config = TrainConfig.model_validate({"batch": 5, "epochs": 2, "lr": 0.1, **train})
    return Client(samples(), Preprocessing(), NetworkPool(lambda _: copy.deepcopy(network)), config, seed=3)


def task(network: nn.Module, **changes: object) -> Task:
    base = Task(
        "train", 1, 0, "full", NetworkSpec("full"), {name: t.clone() for name, t in exchanged_tensors(network).items()}
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_masked_logits_count_as_zero_and_learn_nothing() -> None:
    logits = torch.randn(5, 4, requires_grad=True)
    targets = torch.tensor([0, 2, 2, 0, 0])
    loss = masked_cross_entropy(logits, targets, (0, 2))
    zeroed = logits.detach().clone()
    zeroed[:, [1, 3]] = 0
    torch.testing.assert_close(loss, F.cross_entropy(zeroed, targets))
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad[:, [1, 3]].any()
    torch.testing.assert_close(masked_cross_entropy(logits, targets, None), F.cross_entropy(logits, targets))


@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.01), (0.0, 0.0)])
@pytest.mark.parametrize("masked", [True, False])
def test_training_is_plain_sgd(masked: bool, momentum: float, decay: float) -> None:
    network = model()
    network[1] = nn.Identity()  # dropout has a test of its own
    own = client(network, masked_loss=masked, weight_decay=decay, momentum=momentum)
    update = own.run(task(network))

    velocity = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    generator = torch_generator(3, "batches", 1, 0, "full")
    feed = Feed(samples(), Preprocessing())
    losses: list[float] = []
    for _ in range(2):
        losses = []
        for inputs, targets in feed.shuffled(5, generator):
            logits = network(inputs)
            if masked:
                logits = logits * torch.tensor([1.0, 1.0, 1.0, 0.0])
            loss = F.cross_entropy(logits, targets)
            gradients = torch.autograd.grad(loss, list(network.parameters()))
            losses += [loss.item()] * len(targets)
            with torch.no_grad():
                for (name, p), gradient in zip(network.named_parameters(), gradients, strict=True):
                    velocity[name] = momentum * velocity[name] + gradient + decay * p
                    p -= 0.1 * velocity[name]
    for name, p in network.named_parameters():
        torch.testing.assert_close(update.tensors[name], p.detach(), rtol=1e-5, atol=1e-6)
    assert update.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert update.labels == ((0, 1, 2) if masked else None)
    assert update.samples == 22


def test_an_update_depends_on_its_task_alone() -> None:
    network = model()
    own = client(network)
    torch.manual_seed(1)
    first = own.run(task(network)).tensors
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = own.run(task(network)).tensors
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), before)
    for other in (task(network, round=2), task(network, client=1)):
        assert not torch.equal(own.run(other).tensors["0.weight"], first["0.weight"])


def test_an_update_does_not_change_with_the_tasks_after_it() -> None:
    network = model()
    own = client(network)
    update = own.run(task(network)).tensors
    copies = {name: t.clone() for name, t in update.items()}
    own.run(task(network, round=2))
    assert all(torch.equal(update[name], copies[name]) for name in update)
    assert all(type(t) is torch.Tensor and not t.requires_grad for t in update.values())


class Watchful(nn.Module):
    """Looks at its weight through a second tensor in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.weight_as_line = self.fc.weight.detach().view(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.fc(x) * (1 + self.weight_as_line.abs().mean())
        return scores


def test_tensors_that_share_memory_go_on_sharing_it() -> None:
    network = Watchful()
    own, other = (replace(client(network), networks=NetworkPool(lambda _: Watchful())) for _ in range(2))
    expected = other.run(task(network, round=2)).tensors
    own.run(task(network))
    assert all(torch.equal(t, expected[name]) for name, t in own.run(task(network, round=2)).tensors.items())


def test_a_client_sends_back_what_it_was_sent_and_changes_nothing_else() -> None:
    network = model()
    sent: Tensors = {name: t.clone() for name, t in exchanged_tensors(network).items() if name != "3.bias"}
    copies = {name: t.clone() for name, t in sent.items()}
    update = client(network).run(task(network, tensors=sent))
    assert list(update.tensors) == list(sent)
    assert all(torch.equal(sent[name], copies[name]) for name in sent)


def trained(**train: object) -> Tensors:
    network = to_hybrid(model(), {"0": 2})
    return client(network, **train).run(task(network)).tensors


def test_frobenius_decay_takes_the_place_of_weight_decay_on_factors() -> None:
    plain = trained(frobenius_decay=0, weight_decay=0)
    assert torch.equal(trained(frobenius_decay=0, weight_decay=0, decay_factors=True)["0.u"], plain["0.u"])
    # with Frobenius decay on (however small), weight decay no longer reaches the factors …
    tiny = {"frobenius_decay": 1e-30, "epochs": 1, "batch": 22}
    assert torch.equal(trained(**tiny, weight_decay=0.5)["0.u"], trained(**tiny, weight_decay=0.0)["0.u"])
    assert not torch.equal(trained(**tiny, weight_decay=0.5)["3.weight"], trained(**tiny)["3.weight"])
    # … unless it is asked for, as published code has it
    both = trained(**tiny, weight_decay=0.5, decay_factors=True)
    assert not torch.equal(both["0.u"], trained(**tiny, weight_decay=0.0)["0.u"])
    norm = [trained(frobenius_decay=strength)["0.u"].norm() for strength in (0.0, 1.0)]
    assert norm[1] < norm[0]


def test_the_learning_rate_and_clipping_limit_the_step() -> None:
    start = exchanged_tensors(model())["0.weight"]

    def step(**train: object) -> float:
        network = model()
        update = client(network, epochs=1, batch=22, weight_decay=0, **train).run(task(network))
        return float((update.tensors["0.weight"] - start).norm())

    assert step(milestones=[0]) == pytest.approx(0.1 * step(), rel=1e-3)
    assert step(clip_norm=1e-3) <= 1.001e-4


def test_sparse_gradients_train_too() -> None:
    network = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 4))
    words = Samples(torch.arange(44).reshape(22, 2) % 9, torch.arange(22) % 3)
    own = replace(client(network, weight_decay=0), samples=words)
    update = own.run(task(network))
    assert not torch.equal(update.tensors["0.weight"], exchanged_tensors(network)["0.weight"])


@pytest.mark.parametrize(
    ("train", "optimizer"),
    [
        ({"momentum": 0.8, "nesterov": True}, partial(torch.optim.SGD, momentum=0.8, nesterov=True)),
        ({"momentum": 0.8, "dampening": 0.3}, partial(torch.optim.SGD, momentum=0.8, dampening=0.3)),
        ({"optimizer": "adamw"}, torch.optim.AdamW),
        (
            {"optimizer": "adamw", "betas": [0.7, 0.9], "eps": 1e-3, "amsgrad": True},
            partial(torch.optim.AdamW, betas=(0.7, 0.9), eps=1e-3, amsgrad=True),
        ),
    ],
)
def test_optimizers_are_torchs_own(train: dict[str, object], optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    network = nn.Sequential(*(layer for layer in model() if not isinstance(layer, nn.Dropout)))  # type: ignore[attr-defined]
    plain = copy.deepcopy(network)
    settings = {"weight_decay": 0.1, "lr": 0.01, "batch": 22, "epochs": 3, "masked_loss": False}
    update = client(network, **settings, **train).run(task(network))
    data, steps = samples(), optimizer(plain.train().parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(3):
        steps.zero_grad()
        F.cross_entropy(plain(data.inputs), data.labels).backward()
        steps.step()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(update.tensors[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_what_torch_refuses_is_refused_before_a_run() -> None:
    with pytest.raises(ValueError, match="nesterov needs a momentum, and no dampening"):
        TrainConfig(nesterov=True, momentum=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.01), (0.0, 0.0)])
def test_every_type_of_numbers_is_trained_as_by_torchs_own_loop(
    dtype: torch.dtype, momentum: float, decay: float
) -> None:
    network = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 4)).to(dtype)
    feed = Feed(Samples(samples().inputs.to(dtype), samples().labels), Preprocessing())
    own = replace(client(network, masked_loss=False, momentum=momentum, weight_decay=decay), samples=feed.samples)
    sent = task(network).tensors
    update = own.run(task(network))

    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum, weight_decay=decay)
    generator = torch_generator(3, "batches", 1, 0, "full")
    for _ in range(2):
        for inputs, targets in feed.shuffled(5, generator):
            optimizer.zero_grad()
            F.cross_entropy(network(inputs), targets).backward()
            optimizer.step()
    for name, parameter in network.named_parameters():
        assert not torch.equal(update.tensors[name], sent[name])
        torch.testing.assert_close(update.tensors[name], parameter.detach())


class Wave(nn.Module):
    """A model with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Linear(6, 20, dtype=torch.complex64)
        self.last = nn.Linear(20, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.wave(x.cfloat()).abs())
        return out


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_complex_weights_are_trained_and_travel(optimizer: str) -> None:
    network = Wave()
    update = client(network, optimizer=optimizer, lr=0.01, clip_norm=1.0).run(task(network))
    assert update.tensors["wave.weight"].dtype == torch.complex64
    moved = update.tensors["wave.weight"] - network.wave.weight.detach()
    assert moved.real.abs().min() > 0
    assert moved.imag.abs().min() > 0


def test_adamw_is_refused_where_its_epsilon_vanishes() -> None:
    check_optimizer(model(), TrainConfig(optimizer="adamw"))
    check_optimizer(model().half(), TrainConfig(optimizer="adamw", eps=1e-4))
    with pytest.raises(FedhmError, match="1e-08 is 0 in the model's float16, and AdamW divides by it: set it to 1e-4"):
        check_optimizer(model().half(), TrainConfig(optimizer="adamw"))
