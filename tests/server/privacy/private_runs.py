"""Small private federations, and updates made by hand, that the tests of privacy share."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conftest import small_config
from fedhm.assembly import assemble
from fedhm.config.schema import Config
from fedhm.data.federation import Federation, from_arrays
from fedhm.experiment import Experiment
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Reply, Task, Update

CLIP = 0.5
SERVER = {"clip": CLIP, "noise": 1.0}
UPDATES = {"name": "fedhm", "tiers": [1, "1/2", "1/4"], "aggregate": "updates"}


def private_config(**sections: dict[str, object]) -> Config:
    """Eight clients of three tiers, every one of whom is asked in every round."""
    table: dict[str, dict[str, object]] = {
        "privacy": SERVER,
        "method": UPDATES,
        "train": {"masked_loss": False, "rounds": 2, "max_change": 0},
        "federation": {"participation": 1.0},
    }
    for name, section in sections.items():
        old = {} if section.get("name") else table.get(name, {})
        table[name] = {**old, **section}
    return small_config(**table)


def plain_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model without BatchNorm, two layers of which are factorized, with a frozen layer and a mask in it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Conv2d(4, 6, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(24, 12),
            nn.Linear(12, 4),
        )
    model[0].bias.requires_grad_(False)
    model.register_buffer("mask", torch.full((3,), -1e9))
    return model.to(dtype)


def normal_federation(clients: int = 8, dtype: torch.dtype = torch.float32) -> Federation:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % 4
        return torch.randn(count, 1, 6, 6, generator=generator, dtype=dtype) + labels[:, None, None, None], labels

    return from_arrays([draw(12) for _ in range(clients)], draw(20), dtype=dtype)


@dataclass
class ByHand:
    """An engine whose clients answer what a function makes of what they were sent; None: they do not."""

    answer: Callable[[Task], Tensors | None]

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        for position, task in enumerate(tasks):
            if (tensors := self.answer(task)) is not None:
                yield Update(
                    task.kind, task.round, task.client, task.tier, task.network, tensors, 12, None, 0.5, position
                )

    def close(self) -> None:
        return


def by_hand(config: Config, answer: Callable[[Task], Tensors | None], dtype: torch.dtype = torch.float32) -> Experiment:
    """An experiment of `plain_model` whose clients answer by hand."""
    clients = config.federation.clients
    experiment = assemble(plain_model(dtype), normal_federation(clients, dtype), config, ByHand(answer))
    if experiment.filters.privacy:
        experiment.filters.privacy.secret.value = b"s" * 32
    return experiment


def vector(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def changed(task: Task, generator: torch.Generator, scale: float) -> Tensors:
    """What a client was sent, with every number that is trained changed at random."""
    untrained = ("mask", "0.bias")
    return {
        name: t if name in untrained else t + scale * torch.randn(t.shape, generator=generator).to(t)
        for name, t in task.tensors.items()
    }


def settings(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of a private run as a user writes them."""
    return {
        "privacy": dict(SERVER),
        "method": dict(UPDATES),
        "train": {"masked_loss": False, "rounds": 3, "batch": 6, "lr": 0.05},
        "engine": {"threads": 1, "workers": 1},
    } | sections
