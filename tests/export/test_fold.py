"""BatchNorm is folded where that is exact, and only there."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fedhm
from fedhm.export.program import as_program, fold_batchnorm
from fedhm.export.source import ExportSource
from fedhm.lowrank.hybrid import to_hadamard


def with_statistics(network: nn.Module) -> nn.Module:
    """Return the network with BatchNorm layers that do something."""
    torch.manual_seed(0)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            if layer.affine:
                nn.init.normal_(layer.weight)
                nn.init.normal_(layer.bias)
    return network.eval()


class TwoUses(nn.Module):
    """The convolution's output is used before it is normalised, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


class Tied(nn.Module):
    """One convolution, normalised in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.conv(torch.relu(self.first(self.conv(x)))))
        return y


def factorized() -> nn.Module:
    return fedhm.to_hybrid(nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)), {"0": 2})


CASES: list[tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = [  # network, shape, folded, left
    (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding="same", bias=False), nn.BatchNorm2d(8)), (3, 6, 6), 1, 0),
    (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False), nn.ReLU()), (3, 6, 6), 1, 0),
    (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), (5,), 1, 0),
    (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(7)), (7, 5), 0, 1),  # another axis is normalised
    (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8)), (3, 6, 6), 0, 1),
    (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)), (3, 6, 6), 0, 1),
    (TwoUses, (3, 6, 6), 0, 1),
    (Tied, (3, 6, 6), 2, 0),
    (factorized, (3, 8, 8), 1, 0),
]


@pytest.mark.parametrize(("make", "shape", "folded", "left"), CASES)
def test_folding_is_exact(make: Callable[[], nn.Module], shape: tuple[int, ...], folded: int, left: int) -> None:
    network = make() if make is CASES[5][0] else with_statistics(make())
    network.eval()
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    graph = torch.export.export(network, (x,)).module(check_guards=False)
    assert fold_batchnorm(graph) == folded
    with torch.no_grad():
        torch.testing.assert_close(graph(x), network(x), rtol=1e-4, atol=1e-5)
    assert sum(node.target is torch.ops.aten.batch_norm.default for node in graph.graph.nodes) == left


def test_the_second_factor_takes_the_normalisation_and_the_bias() -> None:
    program = as_program(ExportSource(with_statistics(factorized()), "1/8", torch.randn(2, 3, 8, 8), random=True))
    convolutions = [node for node in program.graph.nodes if node.target is torch.ops.aten.conv2d.default]
    assert [len(node.args) > 2 and node.args[2] is not None for node in convolutions] == [False, True]


def test_hadamard_weights_are_composed_once() -> None:
    dense = nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.Flatten(), nn.Linear(8 * 9, 6))
    network = to_hadamard(dense, {"0": 2, "2": 2}, torch.Generator().manual_seed(0)).eval()
    x = torch.randn(3, 4, 6, 6)
    program = as_program(ExportSource(network, "1/8", x, random=True))
    assert not [node for node in program.graph.nodes if node.target in (torch.ops.aten.mul.Tensor,)]
    torch.testing.assert_close(program.module()(x), network(x).detach())
