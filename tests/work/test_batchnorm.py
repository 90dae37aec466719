"""Statistics gathered at several clients are those of their joint data."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import example
from fedhm.networks.batchnorm import running_statistic_names
from fedhm.networks.exchange import load
from fedhm.work.statistics import Statistics, gather, pool


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_pooled_statistics_equal_those_of_the_joint_data(sizes: list[int], scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Identity(), nn.BatchNorm2d(3))
    parts = [torch.randn(size, 3, 4, 5, generator=generator).add(7).mul(scale) for size in sizes]
    stored = pool(gather(network, part.split(2)) for part in parts)
    joint = torch.cat(parts).double()
    torch.testing.assert_close(stored["1.running_mean"], joint.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(stored["1.running_var"], joint.var((0, 2, 3), correction=0), rtol=1e-4, atol=0)


def test_gathering_leaves_no_hooks_and_needs_no_gradients() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    tensors = gather(network, [torch.randn(5, 4)])
    assert set(tensors) == {"1/values", "1/mean", "1/variance"}
    assert not any(module._forward_hooks for module in network.modules())
    assert network[1].momentum == 0.1
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_a_network_in_evaluation_normalises_by_what_was_gathered() -> None:
    """Over a single batch, evaluation with gathered statistics equals training mode on that batch."""
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2))
    batch = torch.randn(6, 1, 8, 8)
    trained = network.train()(batch)
    load(network, pool([gather(network, [batch])]))
    torch.testing.assert_close(network.eval()(batch), trained, rtol=1e-5, atol=1e-5)


def test_layers_without_stored_statistics_are_left_alone() -> None:
    network = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3))
    assert gather(network, [torch.randn(5, 3)]) == {}
    assert pool([{}, {}]) == {}
    assert running_statistic_names(network) == set()
    assert running_statistic_names(nn.BatchNorm1d(3)) == {"running_mean", "running_var"}


def test_a_layer_that_never_runs_is_not_expected() -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.unused = nn.BatchNorm1d(3), nn.BatchNorm1d(7)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(x)
            return y

    network = Forgetful()
    expected = Statistics().expected(network, example(torch.zeros(1, 3)))
    sent = gather(network, [torch.randn(5, 3)])
    assert {n: (t.shape, t.dtype) for n, t in sent.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
