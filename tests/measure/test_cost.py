import pytest
import torch
from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.lowrank.hadamard import HadamardLinear
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.layers import LowRankConv2d
from fedhm.lowrank.plan import plan_ranks
from fedhm.measure.cost import Cost, cost_by_layer, measure, training_memory
from fedhm.models import resnet18


@pytest.mark.parametrize(
    ("layer", "shape", "parameters", "macs"),
    [
        (nn.Linear(3, 4), (3,), 3 * 4 + 4, 3 * 4),
        (nn.Linear(3, 4, bias=False), (5, 3), 3 * 4, 5 * 3 * 4),
        (nn.Conv2d(2, 3, 3, padding=1), (2, 8, 8), 3 * 2 * 9 + 3, 64 * 3 * 2 * 9),
        (nn.Conv2d(2, 3, 3, stride=2), (2, 9, 9), 3 * 2 * 9 + 3, 16 * 3 * 2 * 9),
        (nn.Conv2d(4, 6, (3, 1), groups=2, bias=False), (4, 5, 5), 6 * 2 * 3, 3 * 5 * 6 * 2 * 3),
        (nn.ConvTranspose2d(3, 4, 3), (3, 5, 5), 3 * 4 * 9 + 4, 25 * 3 * 4 * 9),
        (nn.BatchNorm2d(3), (3, 4, 4), 6, 0),
        # the vertical factor works at full width, the horizontal one at the final size
        (
            LowRankConv2d(nn.Conv2d(4, 6, 3, 2, 1), 5),
            (4, 8, 8),
            5 * 3 * (4 + 6) + 6,
            4 * 8 * 5 * 4 * 3 + 16 * 6 * 5 * 3,
        ),
        # the weight is composed once for a batch, however many samples it has
        (HadamardLinear(nn.Linear(9, 8), 3), (9,), 2 * 3 * (9 + 8) + 8, 9 * 8),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_single_layers(layer: nn.Module, shape: tuple[int, ...], parameters: int, macs: int) -> None:
    cost = measure(layer, shape)
    assert cost.parameters == parameters
    assert cost.macs == macs


class Attention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=self.need_weights)[0]
        return y


PROJECTIONS, PRODUCTS = 4 * 5 * 8 * 8, 2 * 5 * 5 * 8  # query, key, value, output; scores, their use: 5 tokens of size 8


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_attention(need_weights: bool, frozen: bool) -> None:
    model = Attention(need_weights).requires_grad_(not frozen)
    cost = measure(model, (5, 8))
    assert cost.macs == PROJECTIONS + PRODUCTS
    assert cost.parameters == (0 if frozen else 4 * (8 * 8 + 8))
    assert cost.bytes == 4 * 4 * (8 * 8 + 8)


def test_transformer_layer_counts_though_torch_would_fuse_it() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert torch.backends.mha.get_fastpath_enabled()
    assert measure(model, (5, 8)).macs == PROJECTIONS + PRODUCTS + 2 * 5 * 8 * 16
    assert torch.backends.mha.get_fastpath_enabled()


class Recurrent(nn.Module):
    def __init__(self, cells: nn.RNNBase) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cells(x)[0]
        return y


@pytest.mark.parametrize(
    ("cells", "macs"),
    [
        (nn.LSTM(8, 6, batch_first=True), 5 * 4 * 6 * (8 + 6)),
        (nn.LSTM(8, 6, batch_first=True, bidirectional=True), 2 * 5 * 4 * 6 * (8 + 6)),
        (nn.LSTM(8, 6, num_layers=2, batch_first=True, bias=False), 5 * 4 * 6 * (8 + 6) + 5 * 4 * 6 * (6 + 6)),
        (nn.GRU(8, 6, batch_first=True), 5 * 3 * 6 * (8 + 6)),
        (nn.RNN(8, 6, batch_first=True), 5 * 6 * (8 + 6)),
    ],
)
def test_recurrent_layers(cells: nn.RNNBase, macs: int) -> None:
    assert measure(Recurrent(cells), (5, 8)).macs == macs


def test_frozen_parameters_travel_but_are_not_trainable() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert measure(model, (3,)) == Cost(parameters=10, macs=3 * 4 + 4 * 2, bytes=4 * (16 + 10))


def test_a_shared_module_counts_once_in_parameters_and_twice_in_work() -> None:
    layer = nn.Linear(4, 4)
    assert measure(nn.Sequential(layer, layer), (4,)) == Cost(parameters=20, macs=32, bytes=80)


def test_bytes_of_a_tied_tensor_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert measure(model, (4,)) == Cost(parameters=20, macs=32, bytes=80)


def test_bytes_count_floating_buffers_at_their_own_size() -> None:
    model = nn.BatchNorm1d(3)  # weight, bias, two averages; the counter does not travel
    assert measure(model, (3,)).bytes == 4 * 4 * 3
    assert measure(model.double(), (3,)).bytes == 8 * 4 * 3
    assert measure(nn.Linear(3, 4).bfloat16(), (3,)) == Cost(parameters=16, macs=12, bytes=32)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Linear(3, 4), (5,)),
        (nn.Conv2d(3, 4, 3), (1, 8, 8)),
        (nn.Conv2d(3, 4, 3), (3, 2, 2)),
        (Attention(True), (5, 9)),  # torch asserts
        (nn.Bilinear(3, 3, 4), (3,)),  # wants two inputs
        (nn.Flatten(2, 3), (3,)),  # an IndexError
    ],
)
def test_wrong_input_shape(model: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(FedhmError, match="the model does not accept one input of shape") as caught:
        measure(model, shape)
    assert str(shape) in str(caught.value)
    assert model.training
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("shape", [(3, 8, 8), (9, 9)])
def test_every_module_is_back_in_its_own_mode(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Dropout(), nn.ReLU()))
    model[1].eval()  # a frozen BatchNorm
    model[2][0].eval()
    modes = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if shape == (3, 8, 8):
        measure(model, shape)
    else:
        with pytest.raises(FedhmError):
            measure(model, shape)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    model.eval()
    measure(model, (3, 8, 8))
    assert not any(module.training for module in model.modules())


def test_running_statistics_are_not_touched() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    measure(model, (3, 8, 8))
    assert model[1].num_batches_tracked == 0
    assert model[1].running_mean.eq(0).all()


def test_model_without_parameters() -> None:
    assert measure(nn.ReLU(), (3,)) == Cost(parameters=0, macs=0, bytes=0)


def test_training_memory_of_one_linear_where_its_weights_decide() -> None:
    m, n, batch = 40, 30, 2
    weights = m * n + n
    # The peak is in the second backward pass, when the gradients are there: weights, gradients, momentum, the batch,
    # the output and its gradient; the loss and its gradient are one number each.
    floats = 3 * weights + batch * m + 2 * batch * n + 2
    assert training_memory(nn.Linear(m, n), (m,), batch) == 4 * floats
    assert training_memory(nn.Linear(m, n).double(), (m,), batch) == 8 * floats


def test_training_memory_of_one_linear_where_its_batch_decides() -> None:
    m, n, batch = 4, 6, 500
    weights = m * n + n
    # The peak is in the loss: no gradients of weights yet, but the batch, the output, its gradient and at most
    # a few passing copies of the output (logsumexp).
    least = weights * 2 + batch * m + batch * n * 2
    most = weights * 2 + batch * m + batch * n * 5
    assert 4 * least <= training_memory(nn.Linear(m, n), (m,), batch) <= 4 * most


def test_training_memory_counts_a_frozen_layer_without_gradient_and_momentum() -> None:
    m, n, batch = 40, 30, 2
    frozen = nn.Linear(m, n)
    frozen.weight.requires_grad_(False)
    saved = training_memory(nn.Linear(m, n), (m,), batch) - training_memory(frozen, (m,), batch)
    # without the weight's gradient the peak may move to the loss, with its few copies of the output
    assert 4 * (2 * m * n - 3 * batch * n) <= saved <= 4 * 2 * m * n


def test_training_memory_counts_a_shared_layer_once() -> None:
    shared = nn.Linear(40, 40)
    twice = training_memory(nn.Sequential(shared, shared), (40,), 1)
    apart = training_memory(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)), (40,), 1)
    assert twice < apart


def test_training_memory_grows_with_the_batch() -> None:
    sizes = [training_memory(resnet18(4, width=0.125), (3, 16, 16), batch) for batch in (1, 2, 4, 8)]
    assert sizes == sorted(set(sizes))
    # every sample adds its activations
    assert sizes[3] - sizes[2] == pytest.approx(2 * (sizes[2] - sizes[1]), rel=0.05)


def test_training_memory_shrinks_with_the_tier() -> None:
    model = resnet18(10, width=0.5)
    sizes = []
    for ratio in (1, 1 / 2, 1 / 4, 1 / 8):
        hybrid = to_hybrid(model, plan_ranks(model, ratio, keep=3), spectral=False)
        sizes.append(training_memory(hybrid, (3, 16, 16), 2))
    assert sizes == sorted(set(sizes), reverse=True)


def test_training_memory_is_the_same_every_time() -> None:
    model = resnet18(4, width=0.125)
    assert len({training_memory(model, (3, 16, 16), 2) for _ in range(3)}) == 1


def test_adamw_holds_one_more_copy_of_the_parameters_than_sgd() -> None:
    m, n, batch = 40, 30, 500  # the peak is in the loss, where activations decide
    more = training_memory(nn.Linear(m, n), (m,), batch, optimizer="adamw") - training_memory(
        nn.Linear(m, n), (m,), batch, optimizer="sgd"
    )
    counters = 2  # of steps, one number for each parameter
    assert more == 4 * (m * n + n + counters)


@pytest.mark.parametrize(("shape", "batch"), [((5,), 2), ((3,), -1)])
def test_training_memory_of_a_wrong_batch(shape: tuple[int, ...], batch: int) -> None:
    with pytest.raises(FedhmError, match=r"the model cannot be trained on a batch of shape \(-?\d, \d\): "):
        training_memory(nn.Linear(3, 4), shape, batch)


class Odd(nn.Module):
    """A shared layer, one that is never called, a weight of its own and a product outside its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), self.a)
        self.unused = nn.Linear(2, 2)
        self.own = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(self.a(x)) @ self.own
        return y


@pytest.mark.parametrize(
    ("model", "shape"), [(resnet18(width=0.25), (3, 32, 32)), (Odd(), (4,)), (nn.Linear(3, 2), (3,))]
)
def test_costs_by_layer_add_up(model: nn.Module, shape: tuple[int, ...]) -> None:
    cost, parts = measure(model, shape), cost_by_layer(model, shape)
    assert sum(part.parameters for part in parts.values()) == cost.parameters
    assert sum(part.macs for part in parts.values()) == cost.macs
    assert all(part.macs >= 0 for part in parts.values())


def test_costs_by_layer_are_those_of_the_layers() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2, bias=False))
    costs = {name: (part.parameters, part.macs) for name, part in cost_by_layer(model, (5,)).items()}
    assert costs == {"0": (42, 35), "1": (0, 0), "2": (14, 14)}


def test_an_unknown_optimizer_is_refused_and_not_measured_as_another() -> None:
    with pytest.raises(FedhmError, match="there is no optimizer 'lion': choose sgd or adamw"):
        training_memory(nn.Linear(4, 2), (4,), 8, optimizer="lion")
