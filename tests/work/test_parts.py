"""Training with less memory: batches in parts, blocks that run again, statistics that stay, in whole runs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.config.schema import TrainConfig
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.measure.cost import training_memory
from fedhm.networks.exchange import exchanged_tensors
from fedhm.networks.reuse import NetworkPool
from fedhm.networks.saving import backward_in_parts
from fedhm.networks.spec import NetworkSpec
from fedhm.networks.structure import copy_network
from fedhm.work.client import Client
from fedhm.work.messages import Task, TaskOptions
from fedhm.work.train import inference_batch


def model(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    second = nn.BatchNorm2d(16) if norm else nn.Tanh()
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), second, nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(16 * 36, 24),
        nn.ReLU(),
        nn.Linear(24, 4),
    )


def final(federation: Federation, own: nn.Module, method: dict[str, Any], **train: Any) -> dict[str, Tensor]:
    # statistics are those that training made, not those of the batches that an evaluation gathers others by
    config = small_config(method=method, train=train, evaluation={"static_from": "never"})
    networks = assemble(own, federation, config).run().networks
    return networks[next(iter(networks))].state_dict()  # of the largest tier


METHODS: list[dict[str, Any]] = [
    {"name": "fedhm", "tiers": [1, "1/2", "1/4"]},
    {"name": "fedhm", "tiers": [1, "1/4"], "aggregate": "models"},
    {"name": "fedavg"},
    {"name": "heterofl"},
    {"name": "fedpara"},
]


@pytest.mark.parametrize("most", [1, 3, 5, 7])
def test_gradients_of_parts_add_up(most: int) -> None:
    torch.manual_seed(1)
    inputs, targets = torch.randn(7, 1, 6, 6), torch.randint(4, (7,))
    gradients = []
    for size in (0, most):
        network = model().double()
        trained = list(network.parameters())
        loss = backward_in_parts(
            lambda x, y, net=network: nn.functional.cross_entropy(net(x), y), inputs.double(), targets, size, trained
        )
        gradients.append((loss, *(p.grad for p in trained)))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m['name']}-{m.get('aggregate', '')}")
def test_runs_in_parts_end_where_others_do(federation: Federation, method: dict[str, Any]) -> None:
    """But for what rounding makes of it."""
    whole = final(federation, model(), method, batch=8, rounds=1)
    parts = final(federation, model(), method, batch=8, rounds=1, micro_batch=3)
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-3, atol=1e-5)
    assert any(not torch.equal(parts[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m['name']}-{m.get('aggregate', '')}")
def test_checkpointed_runs_are_the_same_to_the_last_bit(federation: Federation, method: dict[str, Any]) -> None:
    without = final(federation, model(norm=True), method)
    ours = final(federation, model(norm=True), method, checkpointing=True)
    assert all(torch.equal(ours[name], tensor) for name, tensor in without.items())


@pytest.mark.slow
def test_checkpointed_nested_networks_are_the_same(federation: Federation) -> None:
    for form in ("beside", "instead"):
        method = {"name": "fedhm", "tiers": [1, "1/2", "1/4"]}
        without = final(federation, model(), method, nested=0.5, nested_form=form)
        ours = final(federation, model(), method, nested=0.5, nested_form=form, checkpointing=["1", "2"])
        assert all(torch.equal(ours[name], tensor) for name, tensor in without.items())


def test_frozen_statistics_are_those_that_the_model_came_with(federation: Federation) -> None:
    own = model(norm=True)
    norm = own.get_submodule("1.1")
    norm.running_mean.normal_(generator=torch.Generator().manual_seed(0))
    norm.running_var.uniform_(0.5, 2, generator=torch.Generator().manual_seed(0))
    kept = {name: tensor.clone() for name, tensor in norm.named_buffers()}
    method = {"name": "fedhm", "tiers": [1, "1/4"]}
    whole = final(federation, own, method, frozen_statistics=True, rounds=1)
    assert torch.allclose(whole["1.1.running_mean"], kept["running_mean"])
    assert torch.allclose(whole["1.1.running_var"], kept["running_var"])
    parts = final(federation, own, method, frozen_statistics=True, rounds=1, micro_batch=3)
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-3, atol=1e-5)


def test_batchnorm_in_parts_is_warned_of(federation: Federation) -> None:
    with pytest.warns(FedhmWarning, match=r"^with train.micro_batch = 3, BatchNorm layers normalise by the statistics"):
        assemble(small_model(), federation, small_config(train={"micro_batch": 3}))


@pytest.mark.parametrize(
    ("own", "train", "engine", "sentence"),
    [
        (model(), {"frozen_statistics": True}, {}, "^train.frozen_statistics = true, but the model has no BatchNorm"),
        (small_model(), {"checkpointing": True}, {}, "^train.checkpointing = true, but the model has no blocks"),
        (model(), {"checkpointing": ["nowhere"]}, {}, "^train.checkpointing: the model has no module 'nowhere'$"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    federation: Federation, own: nn.Module, train: dict[str, Any], engine: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(FedhmError, match=sentence):
        assemble(own, federation, small_config(train=train, engine=engine))


@pytest.mark.parametrize(
    ("train", "options", "most"),
    [
        ({}, {}, 100),
        ({"checkpointing": True}, {}, 12),
        ({"micro_batch": 5}, {}, 5),
        ({"micro_batch": 12}, {}, 100),
        ({}, {"micro_batch": 4, "checkpointing": True}, 4),
        ({}, {"micro_batch": 0, "checkpointing": True}, 12),
    ],
)
def test_passes_without_gradients_take_no_more_than_training(
    train: dict[str, Any], options: dict[str, Any], most: int
) -> None:
    task = Task("statistics", 1, 0, "full", NetworkSpec("full"), {}, options=TaskOptions(**options))
    assert inference_batch(100, TrainConfig(batch=12, **train), task) == most
    assert inference_batch(3, TrainConfig(batch=12, **train), task) == 3


class Widest(nn.Module):
    """Remembers how many samples it saw at once."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.inner, self._seen = small_model(), seen

    def forward(self, x: Tensor) -> Tensor:
        self._seen.append(len(x))
        y: Tensor = self.inner(x)
        return y

    def __deepcopy__(self, memo: dict[int, object]) -> "Widest":
        other = Widest(self._seen)
        other.inner = copy_network(self.inner)
        return other


@pytest.mark.parametrize(("train", "most"), [({}, 32), ({"micro_batch": 4}, 4)])
@pytest.mark.filterwarnings("ignore:.*BatchNorm layers normalise")
def test_statistics_and_evaluation_at_clients_keep_to_it(
    federation: Federation, train: dict[str, Any], most: int
) -> None:
    seen: list[int] = []
    client = Client(
        federation.clients[0],
        federation.preprocessing,
        NetworkPool(lambda _: Widest(seen)),
        TrainConfig(batch=8, **train),
        0,
        tests=federation.clients[0],
    )
    tensors = exchanged_tensors(Widest([]))
    client.run(Task("statistics", 1, 0, "full", NetworkSpec("full"), tensors))
    assert max(seen) == min(most, len(federation.clients[0]))
    seen.clear()
    client.run(Task("evaluate", 1, 0, "full", NetworkSpec("full"), tensors, options=TaskOptions(batch=10)))
    assert max(seen) == min(most, 10)


@pytest.mark.slow
def test_memory_falls_with_parts_and_blocks() -> None:
    def taken(**how: Any) -> int:
        return training_memory(fedhm.models.resnet18(10, width=0.25), (3, 32, 32), 32, **how)

    whole, parts, blocks = taken(), taken(micro_batch=8), taken(checkpointing=True)
    both = taken(micro_batch=8, checkpointing=True)
    assert both < parts < 0.5 * whole
    assert both < blocks < 0.75 * whole
    assert taken(micro_batch=32) == taken(micro_batch=64) == whole
