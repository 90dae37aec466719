"""Training graphs in ExecuTorch's runtime against PyTorch: every gradient, for every kind of network."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.config.registry import make
from fedhm.config.schema import TrainConfig
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.plan import plan_ranks
from fedhm.models.images import cnn, mlp, resnet10, resnet18, resnet34, vit
from fedhm.ondevice import check, rewrites
from fedhm.ondevice.check import DifferenceError, GraphCheck, check_graph
from fedhm.ondevice.graph import Example, build_graph

pytest.importorskip("executorch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TRAIN = TrainConfig(batch=6, nested=0.0)


def checked(network: nn.Module, shape: tuple[int, ...], objective: str = "classification") -> GraphCheck:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, *shape, generator=generator)
    regression = objective == "regression"
    y = torch.randn(20, 10, generator=generator) if regression else torch.arange(20) % 7
    learned, example = make("objectives", objective), Example(x, y, 1 if regression else 10)
    graph = build_graph(network, learned, TRAIN, example)
    return check_graph(network, learned, TRAIN, graph, example)


class Foreign(nn.Module):
    """A network as others write it: pooling of all kinds, a skip connection, GroupNorm, a padded concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norm, self.out = nn.GroupNorm(2, 8), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.first(x)))
        x = F.max_pool2d(x + self.second(x), 3, 2, 1)
        pooled = torch.cat([F.avg_pool2d(F.pad(x, (0, 1, 0, 1)), 2), F.max_pool2d(x, 2, ceil_mode=True)], 1)
        return self.out(F.adaptive_avg_pool2d(pooled, 1).flatten(1))


class Signals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 6, 5, stride=2), nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.max_pool1d(torch.tanh(self.norm(self.conv(x))), 2).mean(2))


class Separable(nn.Module):
    """Depthwise and pointwise convolutions with a squeeze-and-excite gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depth = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm, self.gate, self.out = nn.BatchNorm2d(8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardtanh(self.norm(self.depth(F.leaky_relu(self.stem(x)))), 0.0, 6.0)
        x = x * torch.sigmoid(self.gate(x.mean((2, 3))))[:, :, None, None]
        return self.out(F.avg_pool2d(x, 4).flatten(1))


class Mixer(nn.Module):
    """Patches as tokens, mixed among themselves and by their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norms = nn.Conv2d(3, 8, 2, 2), nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 16))
        self.channels = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.scale, self.out = nn.Parameter(torch.full((8,), 0.5)), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.scale * self.channels(self.norms[1](x))
        return self.out(x.mean(1))


def tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 10))
    network[1].weight = network[0].weight
    return network


def perceptron() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 16), nn.ELU(), nn.BatchNorm1d(16), nn.Linear(16, 10))


MAKERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (lambda: cnn(10, 1, 0.5), (1, 8, 8)),
    "mlp": (lambda: mlp(10, 12, 0.5), (12,)),
    "resnet10": (lambda: resnet10(10, 3, 0.15), (3, 8, 8)),
    "resnet18": (lambda: resnet18(10, 3, 0.15), (3, 8, 8)),
    "resnet34": (lambda: resnet34(10, 3, 0.15), (3, 8, 8)),
    "vit": (lambda: vit(10, 3, 0.25, 1, 4, (8, 8)), (3, 8, 8)),
    "foreign": (Foreign, (3, 9, 9)),
    "signals": (Signals, (2, 20)),
    "separable": (Separable, (1, 8, 8)),
    "perceptron": (perceptron, (12,)),
    "mixer": (Mixer, (3, 8, 8)),
}
TIERS = ("", "1/2", "1/4", "1/8")
CASES = [(name, tier) for name in ("cnn", "mlp", "resnet10", "vit") for tier in TIERS]
CASES += [("resnet18", "1/8"), ("resnet34", "")]  # `benchmarks/on_device.py` checks their other tiers
CASES += [(name, "") for name in ("foreign", "signals", "separable", "perceptron", "mixer")]


@pytest.mark.parametrize(("name", "tier"), CASES)
def test_gradients_statistics_and_outputs_are_pytorchs(name: str, tier: str) -> None:
    torch.manual_seed(0)
    make_network, shape = MAKERS[name]
    network = make_network()
    if tier:
        network = to_hybrid(network, plan_ranks(network, tier))
    found = checked(network, shape)
    # the last of many layers normalise few values here: PyTorch's own gradients round as much
    assert found.gradients < (1e-2 if name in ("resnet18", "resnet34") else 1e-4)
    assert found.statistics < 1e-5
    assert found.outputs < 1e-5


def test_regression_has_its_own_loss() -> None:
    torch.manual_seed(0)
    assert checked(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 10)), (5,), "regression").gradients < 1e-5


def test_a_wrong_operator_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime's own max-pooling gives wrong gradients without an error: the check must see them."""
    monkeypatch.delitem(rewrites.REWRITES, torch.ops.aten.max_pool2d.default)
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(16, 10)
    with pytest.raises(
        FedhmError, match=r"another gradient than PyTorch for '0\.(weight|bias)'.*layer '0'.*max_pool2d"
    ):
        checked(nn.Sequential(*layers), (1, 8, 8))


class Centred(nn.Module):
    """A layer that mixes samples: rows that only fill the batch would change the others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y - y.mean(0)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(6, 10), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def frozen() -> nn.Module:
    network = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 10))
    network[0].requires_grad_(False)
    return network


@pytest.mark.parametrize(
    ("network", "sentence"),
    [
        (Centred(), "another gradient than PyTorch"),
        (Unused(), "'spare.weight' gets no gradient"),
        (frozen(), "'0.weight' is frozen"),
        (nn.Linear(6, 10).double(), "is torch.float64"),
        (tied(), r"'1.weight' is the same tensor as '0.weight'"),
    ],
)
def test_networks_that_would_train_otherwise_are_refused(network: nn.Module, sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        checked(network, (6,))


def test_a_kink_that_rounding_decides_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that differs with some weights, but not with others, computes right."""
    answers = iter([DifferenceError("a kink"), DifferenceError("a kink"), check.GraphCheck(0.0, 0.0, 0.0, 3)])

    def compared(*_: object) -> GraphCheck:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(check, "_compare_steps", compared)
    assert checked(nn.Linear(6, 10), (6,)).gradients == 0.0
