"""What a network and the one inside it have in common runs once, and the numbers are those of two full passes."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.config.schema import TrainConfig
from fedhm.data.samples import Preprocessing, Samples
from fedhm.measure.cost import AliveBytes, OperationWatch
from fedhm.methods.fedhm import FedHM, FedHMConfig
from fedhm.methods.method import Setup
from fedhm.models import resnet18
from fedhm.networks.exchange import exchanged_tensors
from fedhm.networks.reuse import NetworkPool
from fedhm.work.client import Client
from fedhm.work.messages import Participant, Task, Update

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


class Counting(OperationWatch):
    """Counts slow operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {CONVOLUTIONS[0]: 0, CONVOLUTIONS[1]: 0, aten.mm.default: 0, aten.addmm.default: 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.counts:
            self.counts[func] += 1
        return func(*args, **(kwargs or {}))


class Blocks(nn.Module):
    """A network of somebody else: changes in place, functional layers, a buffer that it reads, two uses of a layer."""

    mask: Tensor

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(24)
        self.one, self.two = (nn.Conv2d(24, 24, 3, padding=1) for _ in range(2))
        self.act = nn.ReLU(inplace=True)
        self.register_buffer("mask", torch.linspace(0.5, 1.5, 24).reshape(1, 24, 1, 1))
        self.drop, self.small, self.out = nn.Dropout(drop), nn.Conv2d(24, 24, 3), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        x = self.drop(x) * self.mask
        y = F.gelu(self.one(x))
        y += x
        y = F.relu(self.one(y) + self.two(y), inplace=True)
        if x.mean() > -10:  # depends on the data
            y = F.avg_pool2d(y, 2)
        z: Tensor = self.out(self.small(y).mean((2, 3)))
        return z


class Tied(nn.Module):
    """A weight is used before the first layer that is smaller inside, and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.out = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(torch.tanh(self.first(x))))
        y: Tensor = self.out(F.linear(hidden, self.first.weight.T))
        return y


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return gradient * 2


class OwnFunction(nn.Module):
    """An operation with gradients of its own stands between two common layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.hidden, self.out = (nn.Linear(32, n) for n in (32, 32, 32, 4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        y = Doubled.apply(first)
        with torch.no_grad():
            scale = torch.relu(first).mean()
        y = torch.tanh(self.second(y)) * scale + first
        z: Tensor = self.out(F.relu(self.hidden(y)))
        return z


def of_resnet() -> nn.Module:
    return resnet18(width=0.25)


def prepared(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    keep: int = 3,
    nested_tier: Literal["smallest", "random"] = "smallest",
    tier: str = "full",
    ratio: float = 1 / 2,
    **train: object,
) -> tuple[Client, Task]:
    torch.manual_seed(0)
    model = make().to(dtype)
    last = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)][-1]
    setup = Setup(last, nested=(1.0, 1.0), nested_tier=nested_tier)
    method = FedHM(model, FedHMConfig(tiers=(1, ratio, 1 / 8), keep=keep), setup)
    state = method.start(exchanged_tensors(model))
    (task,) = method.tasks(state, [Participant(0, tier)], 1)
    assert task.kind == "nested"
    samples = Samples(torch.randn(12, *shape, dtype=dtype), torch.arange(12) % 4)
    config = TrainConfig.model_validate({"batch": 6, "epochs": 2, "lr": 0.05, "nested": 0.5} | train)
    return Client(samples, Preprocessing(), NetworkPool(method.network), config, seed=3), task


def both(
    monkeypatch: pytest.MonkeyPatch, client: Client, task: Task
) -> tuple[tuple[Update, dict[Any, int]], tuple[Update, dict[Any, int]]]:
    """Return the updates with a common prefix and with two full passes, and how often each slow operation ran."""
    results = []
    for shares in (True, False):
        with monkeypatch.context() as patch, Counting() as counting:
            if not shares:
                patch.setattr("fedhm.work.nested.may_share", lambda *_: False)
            results.append((client.run(task), counting.counts))
    return results[0], results[1]


def assert_close(one: Update, other: Update, tolerance: float = 1e-10) -> None:
    assert one.loss == pytest.approx(other.loss, rel=tolerance, abs=tolerance)
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(tensor, other.tensors[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("nested_tier", ["smallest", "random"])
@pytest.mark.parametrize("tier", ["full", "1/2"])
def test_resnet(monkeypatch: pytest.MonkeyPatch, tier: str, nested_tier: Literal["smallest", "random"]) -> None:
    client, task = prepared(of_resnet, (3, 8, 8), tier=tier, nested_tier=nested_tier)
    (shared, less), (plain, more) = both(monkeypatch, client, task)
    assert_close(shared, plain)
    steps, common = 4, 3
    assert [more[each] - less[each] for each in CONVOLUTIONS] == [steps * common] * 2


@pytest.mark.parametrize(
    ("make", "shape", "keep", "saved"),
    [
        (Blocks, (3, 8, 8), 3, 4 * 4),
        (lambda: Blocks(drop=0.5), (3, 8, 8), 3, 4 * 1),  # everything behind the dropout differs
        (Tied, (8,), 1, 0),
        (OwnFunction, (32,), 2, 4 * 1),
    ],
)
def test_networks_of_somebody_else(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], shape: tuple[int, ...], keep: int, saved: int
) -> None:
    client, task = prepared(make, shape, keep=keep, ratio=1 / 4)
    (shared, less), (plain, more) = both(monkeypatch, client, task)
    assert_close(shared, plain)
    kind = CONVOLUTIONS[0] if len(shape) == 3 else aten.addmm.default
    assert more[kind] - less[kind] == saved


@pytest.mark.parametrize(
    "settings", [{"keep": 0}, {"micro_batch": 3}, {"checkpointing": True}, {"nested_form": "instead"}]
)
def test_where_nothing_is_shared_every_bit_is_as_before(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    client, task = prepared(of_resnet, (3, 8, 8), dtype=torch.float32, **settings)
    (one, counts), (other, plain) = both(monkeypatch, client, task)
    assert counts == plain
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    updates = {}
    for each in (precision, "float32"):
        client, task = prepared(of_resnet, (3, 8, 8), dtype=torch.float32, precision=each, batch=12, epochs=1)
        (shared, less), (plain, more) = both(monkeypatch, client, task)
        assert less[CONVOLUTIONS[1]] < more[CONVOLUTIONS[1]]
        updates[each] = shared, plain
    exact = updates["float32"][1]

    def error(update: Update) -> float:
        return sum((tensor - exact.tensors[name]).norm().item() for name, tensor in update.tensors.items())

    shared, plain = updates[precision]
    assert shared.loss == pytest.approx(plain.loss, rel=1e-6)
    assert error(shared) < 1.5 * error(plain)


def test_with_frozen_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    client, task = prepared(of_resnet, (3, 8, 8), frozen_statistics=True, lr=1e-3)
    (shared, less), (plain, more) = both(monkeypatch, client, task)
    assert_close(shared, plain)
    assert [more[each] - less[each] for each in CONVOLUTIONS] == [4 * 3] * 2


def test_memory_grows_by_one_activation_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the common activations, which each pass has anyway, a step holds the gradient that waits at the cut."""
    client, task = prepared(lambda: resnet18(width=0.5), (3, 32, 32), dtype=torch.float32, batch=12, epochs=1)
    client.run(task)
    peaks = []
    for shares in (True, False):
        with monkeypatch.context() as patch, AliveBytes() as watch:
            if not shares:
                patch.setattr("fedhm.work.nested.may_share", lambda *_: False)
            client.run(task)
        peaks.append(watch.peak)
    activation = 12 * 32 * 32 * 32 * 4
    assert peaks[0] <= peaks[1] + activation
