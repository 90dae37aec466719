"""Learning from scores: the losses written out, and BatchNorm that looks at batches but remembers nothing."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import example, small_model
from fedhm.config.registry import known
from fedhm.config.schema import TrainConfig
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.networks.batchnorm import normalise_by_batch
from fedhm.networks.exchange import Tensors, exchanged_tensors
from fedhm.networks.reuse import NetworkPool
from fedhm.networks.spec import NetworkSpec
from fedhm.objectives.classification import Classification
from fedhm.seeds import torch_generator
from fedhm.work.client import Client
from fedhm.work.distil import Distil, distil_towards, logits
from fedhm.work.messages import Task, TaskOptions
from fedhm.work.work import work_of

DIVERGENCE = Classification().divergence
COUNT = 22


def inputs(count: int = COUNT, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def public() -> Feed:
    return Feed(Samples(inputs(), torch.arange(COUNT)), Preprocessing())


def network() -> nn.Module:
    """In double precision: a step by the sign of an error must not hang on the last digit."""
    return small_model().double()


def client(**train: object) -> Client:
    config = TrainConfig.model_validate({"batch": 8, "epochs": 2, "lr": 0.05, **train})
    own = Samples(inputs(20, seed=1), torch.arange(20) % 3)
    return Client(own, Preprocessing(), NetworkPool(lambda _: network()), config, 3, public())


def kept() -> Tensors:
    return {name: t.clone() for name, t in exchanged_tensors(network()).items()}


def task(tensors: Tensors, epochs: int = 2, lr: float = 0.3) -> Task:
    return Task(
        "distil", 4, 6, "full", NetworkSpec("full"), tensors, kept(), TaskOptions(digest_epochs=epochs, digest_lr=lr)
    )


def blocks() -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), *parts, nn.Linear(12, 4)).double()


@pytest.mark.parametrize(
    "how", [{"micro_batch": 3}, {"checkpointing": True}, {"micro_batch": 3, "checkpointing": True}]
)
def test_learning_from_scores_saves_memory_too(how: dict[str, object]) -> None:
    """And ends where it does without."""
    ends, most = [], []
    for train in ({}, how):
        seen: list[int] = []

        def build(seen: list[int] = seen) -> nn.Module:
            network = blocks()
            network[2].register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
            return network

        one = replace(client(**train), networks=NetworkPool(lambda _, build=build: build()))
        own = {name: t.clone() for name, t in exchanged_tensors(blocks()).items()}
        asked = Task(
            "distil",
            4,
            6,
            "full",
            NetworkSpec("full"),
            {"consensus": consensus()},
            own,
            TaskOptions(digest_epochs=2, digest_lr=0.3),
        )
        ends.append(one.run(asked).kept)
        most.append(max(seen))
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=1e-9, atol=1e-11)
        assert "micro_batch" in how or torch.equal(ends[1][name], tensor)
    assert most == [8, 4 if "micro_batch" in how else 8]


def consensus() -> torch.Tensor:
    return torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def test_the_losses_are_those_of_the_papers() -> None:
    student, teacher = torch.randn(5, 4).double(), torch.randn(5, 4).double()
    p, q = teacher.softmax(1), student.softmax(1)
    torch.testing.assert_close(DIVERGENCE(student, teacher), (p * (p / q).log()).sum() / 5)
    torch.testing.assert_close(F.l1_loss(student, teacher), (student - teacher).abs().sum() / 20)


@pytest.mark.parametrize("training", [True, False])
def test_batch_statistics_are_used_and_stored_ones_left_alone(training: bool) -> None:
    model = nn.Sequential(network(), nn.Dropout(0.5))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.train(training)
    with normalise_by_batch(model):
        batches = model[0](inputs())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(module.training == training for module in model.modules())
    torch.testing.assert_close(batches, network().train()(inputs()))
    model.train()(inputs())
    assert not torch.equal(model.state_dict()["0.1.running_mean"], before["0.1.running_mean"])


def test_scores_are_logits_by_batch_in_the_order_of_the_samples() -> None:
    model = nn.Sequential(nn.Dropout(0.5), network())
    found = logits(model, public(), 8)
    plain = network().train()
    torch.testing.assert_close(found, torch.cat([plain(part) for part in inputs().split(8)]).detach())
    assert not found.requires_grad
    blank = Distil().expected(model, example(inputs()[:1], COUNT))["logits"]
    assert (blank.shape, blank.dtype) == (found.shape, found.dtype)


def test_digesting_is_plain_sgd_on_absolute_errors() -> None:
    update = client(lr=1e-30, weight_decay=0).run(task({"consensus": consensus()}))  # its own samples teach nothing
    plain = network().train()
    generator = torch_generator(3, "digest", 4, 6)
    for _ in range(2):
        for rows in torch.randperm(COUNT, generator=generator).split(8):
            error = plain(inputs()[rows]) - consensus()[rows]
            wanted = error.detach().sign() / error.numel()
            gradients = torch.autograd.grad(error, list(plain.parameters()), wanted)
            with torch.no_grad():
                for p, gradient in zip(plain.parameters(), gradients, strict=True):
                    p -= 0.3 * gradient
    assert set(update.kept) == set(kept())
    for name, p in plain.named_parameters():
        torch.testing.assert_close(update.kept[name], p.detach())
    assert list(update.tensors) == ["logits"]
    torch.testing.assert_close(
        update.tensors["logits"], torch.cat([plain(part) for part in inputs().split(8)]).detach()
    )


def test_a_client_then_revisits_its_own_samples() -> None:
    """Before there is a consensus a round is plain training, and with one it is training from what was digested.

    What is kept is all of the network after training, running averages too: scoring changes nothing.
    """
    first = client().run(task({}))
    trained = client().run(Task("train", 4, 6, "full", NetworkSpec("full"), kept()))
    assert all(torch.equal(first.kept[name], trained.tensors[name]) for name in kept())
    assert (first.loss, first.samples, first.labels) == (trained.loss, trained.samples, trained.labels)

    digested = client(lr=1e-30, weight_decay=0).run(task({"consensus": consensus()})).kept
    # training from batches does not depend on running averages, which digesting leaves alone
    digested = {name: kept()[name] if "running" in name else tensor for name, tensor in digested.items()}
    revisited = client().run(Task("train", 4, 6, "full", NetworkSpec("full"), digested)).tensors
    second = client().run(task({"consensus": consensus()})).kept
    for name in kept():
        torch.testing.assert_close(second[name], revisited[name])


def test_following_scores_brings_a_network_to_them() -> None:
    teacher, student = network(), small_model(seed=1).double()
    targets = logits(teacher, public(), COUNT)
    before = DIVERGENCE(logits(student, public(), COUNT), targets)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    for _ in range(30):
        distil_towards(student, targets, DIVERGENCE, optimizer, public().ordered(COUNT))
    assert DIVERGENCE(logits(student, public(), COUNT), targets) < 0.05 * before


def test_every_kind_of_task_has_a_short_name_for_the_bar() -> None:
    assert {work_of(kind).short for kind in known("work")} == {"train", "BN", "grad", "distil", "eval"}
