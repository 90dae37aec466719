"""What a pass in training writes into the network itself: constant buffers are told from those that follow the data."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fedhm
from conftest import small_config
from fedhm.assembly import assemble, design
from fedhm.data.federation import from_arrays
from fedhm.errors import FedhmError
from fedhm.measure.self_written import find_self_written

SAMPLE = torch.linspace(-1, 1, 16)[None]


class Own(nn.Module):
    """A model that does something to itself in every pass."""

    def __init__(self, act: Callable[["Own", Tensor], None] = lambda *_: None, mask: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 3))
        self.register_buffer("mask", torch.full((3,), mask))
        self.register_buffer("average", torch.zeros(16))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act(self, x)
        out: Tensor = self.layers(x) + self.mask.clamp(min=-1e9) * 0
        return out


def clip(model: Own, _: Tensor) -> None:
    model.layers[1].weight.data.clamp_(-9, 9)  # type: ignore[operator,union-attr]


def clip_elsewhere(model: Own, _: Tensor) -> None:
    weight = model.layers[1].weight
    weight.data = weight.data.clamp(-9, 9)  # type: ignore[operator,union-attr]


def clip_without_gradient(model: Own, _: Tensor) -> None:
    with torch.no_grad():
        model.layers[1].weight.clamp_(-9, 9)  # type: ignore[operator,union-attr]


def follow(model: Own, x: Tensor) -> None:
    if model.training:
        model.average = 0.9 * model.average + 0.1 * x.mean(0)


def follow_in_place(model: Own, x: Tensor) -> None:
    if model.training:
        model.average.lerp_(x.mean(0), 0.1)


def teach(model: Own, _: Tensor) -> None:
    model.frozen.data = model.frozen.data * 0.5


@pytest.mark.parametrize(
    ("act", "written"),
    [
        (lambda *_: None, set()),
        (clip, {"layers.1.weight"}),
        (clip_elsewhere, {"layers.1.weight"}),
        (clip_without_gradient, {"layers.1.weight"}),
        (follow, {"average"}),
        (follow_in_place, {"average"}),
        (teach, {"frozen"}),
    ],
)
def test_writes_are_seen_and_the_model_and_randomness_stay_as_they_were(
    act: Callable[[Own, Tensor], None], written: set[str]
) -> None:
    model = Own(act)
    before, randomness = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    assert find_self_written(model, SAMPLE) == written
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), randomness)


def test_statistics_of_norms_are_written() -> None:
    network = nn.Sequential(nn.Conv1d(1, 2, 3), nn.InstanceNorm1d(2, track_running_stats=True), nn.BatchNorm1d(2))
    averages = {f"{layer}.{part}" for layer in (1, 2) for part in ("running_mean", "running_var")}
    assert find_self_written(network, torch.randn(1, 1, 8)) == {*averages, "2.num_batches_tracked"}


@pytest.mark.parametrize("act", [clip, clip_elsewhere, clip_without_gradient])
def test_weights_that_forward_changes_are_not_factorized(act: Callable[[Own, Tensor], None]) -> None:
    config = small_config(method={"name": "fedhm", "tiers": [1, 0.25]})
    with pytest.raises(FedhmError, match=r"changes 'layers.1.weight' itself, which has no effect in tier 1/4"):
        design(config, Own(act), SAMPLE, 3)
    design(small_config(method={"name": "fedavg"}), Own(act), SAMPLE, 3)
    design(small_config(method={"name": "fedhm", "tiers": [1]}), Own(act), SAMPLE, 3)


@pytest.mark.parametrize("optimizer", ["none", "momentum"])
@pytest.mark.parametrize("mask", [-1e9, float("-inf")])
@pytest.mark.parametrize("act", [follow, teach])
def test_a_run_keeps_a_constant_buffer_and_averages_those_that_move(
    act: Callable[[Own, Tensor], None], mask: float, optimizer: str
) -> None:
    x, y = torch.randn(40, 16), torch.arange(40) % 3
    config = small_config(
        federation={"clients": 3, "participation": 1.0}, method={"name": "fedhm", "tiers": [1, 0.25]},
        server={"optimizer": optimizer},
    )  # fmt: skip
    result = assemble(Own(act, mask), from_arrays([(x[i::4], y[i::4]) for i in range(3)], (x, y)), config).run()
    for network in result.networks.values():
        assert (network.get_buffer("mask") == mask).all()
        moved = network.get_buffer("average").any() or (network.get_parameter("frozen") < 1).all()
        assert moved


def test_parameters_in_the_same_memory_are_refused_and_tied_ones_are_not() -> None:
    def model(tie: Callable[[nn.Parameter], nn.Parameter]) -> nn.Module:
        layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3))
        layers[1].weight = tie(layers[0].weight)  # type: ignore[arg-type]
        return layers

    config = small_config(method={"name": "fedavg"})
    design(config, model(lambda weight: weight), SAMPLE, 3)
    design(config, model(lambda weight: nn.Parameter(weight.detach().clone())), SAMPLE, 3)
    for tie in (lambda weight: nn.Parameter(weight.data), lambda weight: nn.Parameter(weight.data.T)):
        with pytest.raises(FedhmError, match=r"'0.weight' and '1.weight' are two parameters in the same memory"):
            design(config, model(tie), SAMPLE, 3)


def test_a_tuple_in_training_only_is_refused() -> None:
    class Auxiliary(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x)
            return (scores, x) if self.training else scores  # type: ignore[return-value]

    x, y = torch.randn(20, 16), torch.arange(20) % 3
    with pytest.raises(FedhmError, match="in training, the model must give a tensor of scores, not a tuple"):
        fedhm.run(Auxiliary(16, 3), [(x, y)], (x, y), {"method": "fedavg"})


class CountsCopies(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        gc.collect()
        alive = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
        places = {tensor.untyped_storage().data_ptr() for tensor in alive if tensor.shape == self.weight.shape}
        COPIES.append(len(places))
        return super().forward(inputs)


COPIES: list[int] = []


def test_of_a_large_network_there_is_one_copy_and_no_more() -> None:
    gc.unfreeze()  # tests begin with what is there frozen, which must not hide anything here
    COPIES.clear()
    assert find_self_written(CountsCopies(37, 41), torch.zeros(1, 37)) == frozenset()
    assert COPIES == [2]
