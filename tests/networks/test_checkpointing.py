"""Blocks that run again in the backward pass: the same weights to the last bit, and less memory."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import fedhm
from fedhm.errors import FedhmError
from fedhm.measure.cost import training_memory
from fedhm.models import resnet18
from fedhm.networks.saving import (
    can_checkpoint,
    check_blocks,
    check_repeatable,
    checkpoint_blocks,
    find_blocks,
    find_unrepeatable_block,
)

DATA = [(torch.randn(12, 6, generator=torch.Generator().manual_seed(n)), torch.arange(12) % 3) for n in range(2)]


class Drawing(nn.Module):
    """Draws from generators that torch knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * random.random() * float(np.random.rand())


def plain() -> nn.Module:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))

    return nn.Sequential(nn.Linear(6, 6), block(), block(), nn.Sequential(Drawing(), nn.Tanh()), nn.Linear(6, 3))


def trained(build: Callable[[], nn.Module], shape: tuple[int, ...], asked: bool | list[str]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    network = build().train()
    checkpoint_blocks([network], asked)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.randn(8, *shape)).logsumexp(-1).sum().backward()
        optimizer.step()
    return network.state_dict()


@pytest.mark.parametrize("asked", [True, ["1", "3"]])
def test_weights_and_running_averages_are_the_same(asked: bool | list[str]) -> None:
    ours, theirs = trained(plain, (6,), asked), trained(plain, (6,), False)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours["1.1.num_batches_tracked"] == 3


def test_a_resnet_is_the_same_and_takes_less_memory() -> None:
    def build() -> nn.Module:
        return resnet18(4, width=0.125)

    ours, theirs = trained(build, (3, 16, 16), True), trained(build, (3, 16, 16), False)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    memory = [training_memory(build(), (3, 16, 16), 128, checkpointing=asked) for asked in (False, True)]
    assert memory[1] < 0.8 * memory[0]


class Averages(nn.Module):
    """Computes with an average of its inputs, which it puts in place of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return torch.tanh(self.inner(x) - self.mean)


def remembering() -> nn.Module:
    """Return a network whose passes change buffers that they compute with."""
    spectral = [nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 6), *spectral, nn.Sequential(Averages(), nn.Tanh()), nn.Linear(6, 3))


def test_what_a_pass_changes_is_changed_once_and_was_as_before() -> None:
    ours, theirs = trained(remembering, (6,), True), trained(remembering, (6,), False)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert find_blocks(remembering())
    assert find_unrepeatable_block(remembering(), True, torch.zeros(1, 6)) is None


def test_hooks_of_a_block_run_once() -> None:
    network, seen = plain().train(), []
    network[1].register_forward_pre_hook(lambda *_: seen.append(1))
    checkpoint_blocks([network], True)
    network(torch.randn(4, 6)).sum().backward()
    assert seen == [1]


def test_a_block_runs_again_with_the_weights_that_it_had() -> None:
    """Those of another network, which are lent to it for one pass."""
    torch.manual_seed(0)
    inner, x = plain().eval(), torch.randn(4, 6)
    lent = {name: torch.randn_like(p, requires_grad=True) for name, p in inner.named_parameters()}

    def gradients() -> list[Tensor]:
        random.seed(0)
        np.random.seed(0)
        output = torch.func.functional_call(inner, lent, (x,))
        return list(torch.autograd.grad(output.square().sum(), list(lent.values())))

    expected = gradients()
    checkpoint_blocks([inner], True)
    assert all(torch.equal(one, other) for one, other in zip(gradients(), expected, strict=True))


def test_blocks_are_found_from_the_structure() -> None:
    assert find_blocks(plain()) == ["1", "2", "3.0"]
    assert find_blocks(resnet18(4, width=0.125))[:2] == ["layer1.0", "layer1.1"]
    encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    assert find_blocks(nn.TransformerEncoder(encoder, 2)) == ["layers.0", "layers.1"]
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


OWN = random.Random(0)  # a generator that nobody else knows of


class DrawsItsOwn(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * OWN.random()


class Counts(Drawing):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.inner(x)) * self.calls


@pytest.mark.parametrize("kind", [DrawsItsOwn, Counts])
def test_what_does_not_repeat_itself_is_told_and_never_checkpointed(kind: type[nn.Module]) -> None:
    def build() -> nn.Module:
        odd = nn.Sequential(kind(), nn.Tanh())
        return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), *[nn.Tanh()] * 9), odd, nn.Linear(6, 3))

    with pytest.raises(
        FedhmError, match=r"^train.checkpointing: '2.0' gives other outputs when it runs again"
    ) as error:
        fedhm.run(build(), DATA, DATA[0], {"train": {"checkpointing": True}})
    assert "\n" not in str(error.value)
    assert not can_checkpoint(build(), torch.zeros(1, 6))
    check_repeatable(build(), ["1"], torch.zeros(1, 6))
    least = training_memory(build(), (6,), 64, checkpointing=["1"])
    assert least < training_memory(build(), (6,), 64)
    assert not fedhm.fit(build(), (6,), 64, memory=least).checkpointing


def test_what_repeats_itself_is_not_refused() -> None:
    for build in (plain, remembering):
        check_repeatable(build(), True, torch.zeros(1, 6))
    assert can_checkpoint(resnet18(4, width=0.125), torch.zeros(1, 3, 16, 16))
    assert not can_checkpoint(nn.Linear(2, 2), torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (True, r"^train.checkpointing = true, but the model has no blocks, .* name some of its modules, such as .*'0'"),
        (["9"], r"^train.checkpointing: the model has no module '9'$"),
        (["1", "1.0"], r"^train.checkpointing: '1.0' lies inside another module of the list$"),
    ],
)
def test_what_cannot_be_is_one_sentence(asked: bool | list[str], sentence: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU()) if asked is True else plain()
    with pytest.raises(FedhmError, match=sentence):
        check_blocks(model, asked)
    check_blocks(plain(), True)
    check_blocks(plain(), ["1", "2"])
