"""A client's steps on its own network and one inside it, against the formula."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.config.schema import TrainConfig
from fedhm.data.samples import Preprocessing, Samples
from fedhm.methods.fedhm import FedHM, FedHMConfig
from fedhm.methods.method import Setup
from fedhm.networks.exchange import exchanged_tensors
from fedhm.networks.reuse import NetworkPool
from fedhm.seeds import numpy_generator
from fedhm.work.client import Client
from fedhm.work.messages import Participant
from fedhm.work.nested import BASIS

LR = 0.1


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)).double()


def one_batch() -> Samples:
    return Samples(torch.randn(10, 6, generator=torch.Generator().manual_seed(1)).double(), torch.arange(10) % 3)


@pytest.mark.parametrize("which", ["smallest", "random"])
@pytest.mark.parametrize(
    ("form", "weight"),
    [("sum", 0.5), ("sum", 1.0), ("beside", 0.5), ("beside", 1.0), ("instead", 0.999), ("auto", 1.0)],
)
def test_one_step_of_a_full_client(form: str, weight: float, which: Literal["smallest", "random"]) -> None:
    shares = (1 - weight, weight) if form == "instead" else (1.0, 1.0)
    setup = Setup("4", nested=shares, nested_tier=which)
    method = FedHM(model(), FedHMConfig(tiers=(1, 1 / 3, 1 / 6), start="whole"), setup)
    (task,) = method.tasks(method.start(exchanged_tensors(model())), [Participant(0, "full")], 1)
    train = {"batch": 10, "lr": LR, "momentum": 0, "weight_decay": 0, "frobenius_decay": 0, "nested": weight}
    config = TrainConfig.model_validate({**train, "nested_form": form})
    client = Client(one_batch(), Preprocessing(), NetworkPool(method.network), config, seed=3)
    update = client.run(task)

    draw = numpy_generator(3, "nested", 1, 0, "nested full")
    if form == "instead":
        draw.random()
    tier = method.tiers[1 + int(draw.integers(2))] if which == "random" else method.tiers[-1]
    assert (
        task.tensors[f"{BASIS}2"].shape[1]
        == method.planner.first[method.tiers[1 if which == "random" else 2]].ranks["2"]
    )
    parameters = {n: t.clone().requires_grad_() for n, t in task.tensors.items() if not n.startswith(BASIS)}

    def loss(hidden: Tensor) -> Tensor:
        x = F.relu(F.linear(one_batch().inputs, parameters["0.weight"], parameters["0.bias"]))
        x = F.relu(F.linear(x, hidden, parameters["2.bias"]))
        return F.cross_entropy(F.linear(x, parameters["4.weight"], parameters["4.bias"]), one_batch().labels)

    left = task.tensors[f"{BASIS}2"][:, : method.planner.first[tier].ranks["2"]]  # of the transposed weight
    projected = (left @ (left.T @ parameters["2.weight"].T)).T
    own, inside = loss(parameters["2.weight"]), loss(projected)
    # nothing normalises in this model, so auto is beside
    both = (own + weight * inside) / (1 if form == "sum" else 1 + weight)
    total = inside if form == "instead" else both
    total.backward()  # type: ignore[no-untyped-call]
    assert update.loss == pytest.approx(total.item())
    assert update.tensors.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        torch.testing.assert_close(update.tensors[name], (parameter - LR * parameter.grad).detach())


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(12), nn.LayerNorm(12), nn.GroupNorm(2, 12), nn.RMSNorm(12), nn.ReLU()]
)
def test_steps_are_longer_where_something_normalises(layer: nn.Module) -> None:
    def trained(form: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(6, 12), layer, nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
        method = FedHM(network, FedHMConfig(tiers=(1, 1 / 4)), Setup("4", nested=(1.0, 1.0)))
        (task,) = method.tasks(method.start(exchanged_tensors(network)), [Participant(0, "full")], 1)
        config = TrainConfig.model_validate({"batch": 10, "lr": LR, "nested_form": form})
        samples = Samples(one_batch().inputs.float(), one_batch().labels)
        return Client(samples, Preprocessing(), NetworkPool(method.network), config, seed=3).run(task).tensors

    same, other = ("beside", "sum") if isinstance(layer, nn.ReLU) else ("sum", "beside")
    found = trained("auto")
    assert all(torch.equal(tensor, found[name]) for name, tensor in trained(same).items())
    assert any(not torch.equal(tensor, found[name]) for name, tensor in trained(other).items())


def test_a_larger_tier_is_trained_at_all() -> None:
    with pytest.raises(ValueError, match="needs a nested below 1, or no larger tier would be trained"):
        TrainConfig(nested=1, nested_form="instead")
