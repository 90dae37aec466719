"""Networks train on channels-last images as on others, and their gradients keep that format."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import forked
from fedhm.networks.structure import channels_last
from fedhm.widths.wrappers import OrderedDropout

# narrow shortcuts train in processes of their own, since a fault of oneDNN's kills them
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


class Flattened(nn.Module):
    """A network that flattens its image in one of the ways that people write."""

    def __init__(self, flatten: Callable[[torch.Tensor], torch.Tensor], pool: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), pool)
        self.flatten, self.classifier = flatten, nn.Linear(8 * 9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.classifier(self.flatten(self.features(x)))
        return y


FLATTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "module": nn.Flatten(),
    "module by name": lambda x: nn.Flatten()(input=x),
    "function": lambda x: torch.flatten(x, 1),
}
POOLS = {"disjoint": nn.MaxPool2d(2), "overlapping": nn.MaxPool2d(4, 1), "average": nn.AvgPool2d(2)}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("flatten", FLATTEN)
def test_gradients_stay_channels_last_before_an_image_is_flattened(flatten: str, pool: str) -> None:
    torch.manual_seed(0)
    plain = Flattened(FLATTEN[flatten], POOLS[pool]).to(memory_format=torch.channels_last)
    ours = channels_last(copy.deepcopy(plain))
    assert isinstance(ours, Flattened)
    arrived: list[bool] = []
    ours.features[1].register_full_backward_hook(
        lambda _, __, gradients: arrived.append(gradients[0].is_contiguous(memory_format=torch.channels_last))
    )
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    for network in (plain, ours):
        network(x).square().sum().backward()
    assert arrived == [True]
    for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad), "speed never changes results"


def test_pools_that_return_indices_are_left_alone() -> None:
    class Unpooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.unpool = nn.Conv2d(3, 8, 3), nn.MaxUnpool2d(2)
            self.pool = nn.MaxPool2d(2, return_indices=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pooled, indices = self.pool(self.conv(x))
            y: torch.Tensor = self.unpool(pooled, indices)
            return y

    channels_last(Unpooled())(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).sum().backward()


def test_gradients_of_functorch_pass() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 2)]
    network = channels_last(nn.Sequential(*layers))
    plain = nn.Sequential(*(copy.deepcopy(layer) for layer in network))
    for layer in plain:
        layer._forward_hooks.clear()
        layer._forward_pre_hooks.clear()
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    torch.testing.assert_close(torch.func.jacrev(network)(x), torch.func.jacrev(plain)(x))
    x.requires_grad_()
    (batch,) = torch.autograd.grad(network(x), x, torch.eye(4).view(4, 2, 2), is_grads_batched=True)
    torch.testing.assert_close(batch, torch.func.jacrev(plain)(x).flatten(0, 1))


def test_gradients_that_are_left_out_pass() -> None:
    class Blocked(torch.autograd.Function):
        @staticmethod
        def forward(_: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: object, *__: torch.Tensor) -> None:
            return None

    network = channels_last(nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)))
    y = network(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
    Blocked.apply(y).sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in network.parameters())


def test_a_flattened_parameter_gathers_no_hooks() -> None:
    class Position(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position, self.flatten = nn.Parameter(torch.randn(1, 3, 4, 4)), nn.Flatten()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = x + self.flatten(self.position)
            return y

    network = channels_last(Position())
    network(torch.randn(2, 48)).sum().backward()
    assert not network.position._backward_hooks
