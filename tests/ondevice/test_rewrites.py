"""Rewritten operators against torch's own: the same values, and the same gradients, also where values are equal."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.config.registry import make
from fedhm.errors import FedhmError
from fedhm.ondevice.graph import PREFIX, WEIGHTS, TrainingStep
from fedhm.ondevice.rewrites import Statistic, attention, batch_norm, pad_constant, rewrite


class Kept(nn.Module):
    """A network of one function, with a parameter before it that shows the gradient."""

    def __init__(self, function: Any, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(shape)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale).flatten(1)[:, :3]


def rewritten(network: nn.Module, x: Tensor) -> tuple[nn.Module, list[Statistic], tuple[Tensor, ...]]:
    given = (x, torch.arange(len(x)) % 3, torch.ones(len(x)), torch.ones(3))
    step = TrainingStep(network.train(), make("objectives", "classification"), 0.0)
    graph = torch.export.export(step, given).module(check_guards=False)
    return graph, rewrite(graph, WEIGHTS, PREFIX), given  # type: ignore[arg-type]


POOLS = {
    "max": lambda x: F.max_pool2d(x, 2),
    "max, overlapping": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max, dilated": lambda x: F.max_pool2d(x, 2, 1, 0, 2),
    "max, ceil": lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True),
    "max, oblong": lambda x: F.max_pool2d(x, (3, 1), (2, 1), (1, 0)),
    "mean": lambda x: F.avg_pool2d(x, 2),
    "mean, padded": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "mean, padding not counted": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "mean, ceil": lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True),
    "mean, divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive, by rows": lambda x: F.adaptive_avg_pool2d(x, (7, 1)),
    "convolution": lambda x: F.conv1d(x.flatten(2), torch.ones(6, 1, 3), None, 2, 1, 2, 3),
    "convolution, same": lambda x: F.conv1d(x.flatten(2), torch.ones(6, 3, 5), torch.ones(6), padding="same"),
    "padding": lambda x: F.pad(x, (1, 2, 0, 3), value=0.5),
    "cutting": lambda x: F.pad(x, (-1, 2, 0, -3)),
    "max of signals": lambda x: F.max_pool1d(x.flatten(2), 3, 2, 1),
    "mean of signals": lambda x: F.avg_pool1d(x.flatten(2), 3, 2, 1, count_include_pad=False),
    "adaptive of signals": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 7),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling_and_padding_have_torchs_values_and_gradients(name: str) -> None:
    # values of a coarse grid: many of a window are equal
    x = (torch.randn(4, 3, 7, 7, generator=torch.Generator().manual_seed(0)) * 2).round()
    network = Kept(POOLS[name], (3, 7, 7))
    graph, statistics, given = rewritten(network, x)
    assert statistics == []
    targets = {str(node.target) for node in graph.graph.nodes}  # type: ignore[union-attr]
    assert not any("pool" in each and "aten" in each for each in targets)
    loss, _ = graph(*given)
    loss.backward()
    expected = F.cross_entropy(network(x), given[1])
    expected.backward()
    torch.testing.assert_close(loss, expected)
    found = graph.get_parameter("network.scale").grad
    assert network.scale.grad is not None
    torch.testing.assert_close(found, network.scale.grad)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (6, 3, 4, 4)])
def test_batch_norm_counts_only_rows_with_weight(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape, requires_grad=True)
    gamma, beta = torch.randn(3), torch.randn(3)
    weights = torch.tensor([1.0, 1, 1, 1, 0, 0])
    y, mean, variance = batch_norm(x, gamma, beta, weights, 1e-5)
    running = [torch.zeros(3), torch.ones(3)]
    own = x.detach()[:4].requires_grad_()
    expected = F.batch_norm(own, running[0], running[1], gamma, beta, True, 0.25, 1e-5)
    torch.testing.assert_close(y[:4], expected)
    torch.testing.assert_close(torch.zeros(3).lerp(mean, 0.25), running[0])
    torch.testing.assert_close(torch.ones(3).lerp(variance, 0.25), running[1])
    direction = torch.randn_like(expected)
    (y[:4] * direction).sum().backward()
    (expected * direction).sum().backward()
    assert x.grad is not None
    assert own.grad is not None
    torch.testing.assert_close(x.grad[:4], own.grad)
    assert not x.grad[4:].any()


def test_statistics_are_outputs_with_their_names() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, momentum=0.3), nn.Flatten(), nn.Linear(50, 3))
    x = torch.randn(4, 1, 7, 7)
    graph, statistics, given = rewritten(network, x)
    assert statistics == [Statistic("1.running_mean", "1.running_var", 0.3, 25)]
    *_, mean, variance = graph(*given)
    seen = network[0](x)
    torch.testing.assert_close(mean, seen.mean((0, 2, 3)).detach())
    torch.testing.assert_close(variance, seen.var((0, 2, 3)).detach())


@pytest.mark.parametrize("kind", ["plain", "causal", "boolean mask", "added mask"])
def test_attention_is_torchs(kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    mask = {"boolean mask": torch.rand(5, 5) > 0.3, "added mask": torch.randn(5, 5)}.get(kind)
    if mask is not None and mask.dtype == torch.bool:
        mask |= torch.eye(5, dtype=torch.bool)
    expected = F.scaled_dot_product_attention(q, k, v, mask, is_causal=kind == "causal")
    torch.testing.assert_close(attention(q, k, v, mask, kind == "causal"), expected)


def test_padding_by_concatenation() -> None:
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(pad_constant(x, [1, 2, -1, 0], 0.5), F.pad(x, (1, 2, -1, 0), value=0.5))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1.0)  # type: ignore[operator]
        return self.linear(x)


@pytest.mark.parametrize(
    ("network", "shape", "sentence"),
    [
        (nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), (6,), "^layer '1' .*dropout draws random numbers"),
        (nn.Sequential(nn.Conv2d(1, 3, 3, padding=1, padding_mode="reflect"), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
         (1, 6, 6), "^layer '0' .*padding by 'reflect'"),
        (nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16, 3)), (1, 6, 6),
         r"^layer '0' .*\(6, 6\) to \(4, 4\) by windows of unequal size"),
        (nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)), (1, 6, 6), "^layer '0' .*places"),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.ConvTranspose2d(2, 1, 3), nn.Flatten(), nn.Linear(36, 3)),
         (1, 6, 6), "^layer '2' .*conv_transpose2d has no backward operator"),
        (nn.Sequential(nn.Conv1d(1, 2, 3), nn.ConvTranspose1d(2, 1, 3), nn.Flatten(), nn.Linear(6, 3)), (1, 6),
         "^layer '1' .*conv_transpose1d"),
        (nn.Sequential(nn.Conv3d(1, 2, 3), nn.Flatten(), nn.Linear(2, 3)), (1, 3, 3, 3), "^layer '0' .*conv3d"),
        (Counting(), (6,), "changes 'seen' itself"),
    ],
)  # fmt: skip
def test_other_operators_are_refused_by_their_layer(network: nn.Module, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        rewritten(network, torch.randn(4, *shape))
