"""Narrow shortcuts survive training on channels-last images: in processes of their own, since a fault kills them."""

import pytest
import torch
from torch import nn

import forked
from fedhm.networks.structure import channels_last
from fedhm.widths.wrappers import OrderedDropout

TRAIN = """
import torch
from torch import nn
from fedhm.networks.structure import channels_last
torch.manual_seed(0)
network = channels_last(nn.Conv2d({inputs}, 11, 1, 2, bias=False))
twin = nn.Conv2d({inputs}, 11, 1, 2, bias=False)
twin.load_state_dict(network.state_dict())
for _ in range(15):
    x = torch.randn(32, {inputs}, 32, 32)
    network.zero_grad(), twin.zero_grad()
    network(x.to(memory_format=torch.channels_last)).square().sum().backward()
    twin(x).square().sum().backward()
    torch.testing.assert_close(network.weight.grad, twin.weight.grad, rtol=1e-3, atol=1e-2)
    held = [torch.randn({inputs} * 99 + i) for i in range(20)]  # whoever writes past an end hits something
"""


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [1, 5, 9])
def test_strided_pointwise_convolutions_of_few_channels_train(inputs: int) -> None:
    script = TRAIN.format(inputs=inputs)
    done = forked.code(script)
    assert done.returncode == 0, done.stderr


def test_results_do_not_depend_on_it() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1), nn.ReLU(), nn.Conv2d(5, 4, 1, 2), nn.Conv2d(4, 4, 1))
    x = torch.randn(2, 3, 9, 9)
    expected = network(x)
    got = channels_last(network)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(got, expected)
    assert [len(layer._forward_pre_hooks) for layer in network] == [0, 0, 1, 0]


def test_ordered_dropout_is_prepared_for_its_narrowest_network() -> None:
    wide, narrow = nn.Sequential(nn.Conv2d(32, 8, 1, 2)), nn.Sequential(nn.Conv2d(8, 2, 1, 2))
    channels_last(OrderedDropout(wide, [narrow]))
    assert len(wide[0]._forward_pre_hooks) == len(narrow[0]._forward_pre_hooks) == 1
    x = torch.randn(2, 32, 5, 5).to(memory_format=torch.channels_last)
    assert wide(x).is_contiguous()
    assert wide[0].weight.stride() != wide[0].weight.to(memory_format=torch.channels_last).stride()
