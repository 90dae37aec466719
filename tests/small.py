"""Small federations, models and settings that the tests share, and fixtures of these. One thread: they are small."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import forked
from fedhm.config import registry as plugins
from fedhm.config.loading import parse
from fedhm.config.schema import Config
from fedhm.data.federation import Federation, from_arrays
from fedhm.work.work import Example

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of runs and of the processes that tests start; workers only where a test asks


def small_config(**sections: dict[str, object]) -> Config:
    """Four tiers, eight clients, two rounds; any section's keys can be changed."""
    table: dict[str, dict[str, object]] = {
        "federation": {"clients": 8, "participation": 0.5},
        "train": {"rounds": 2, "epochs": 1, "batch": 8, "lr": 0.05},
        "method": {"name": "fedhm"},
        "engine": {"threads": 1},
    }
    for name, section in sections.items():
        old = {} if section.get("name") else table.get(name, {})
        table[name] = {**old, **section}
    return parse(table, "test")


def small_model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 9, 24),
            nn.ReLU(),
            nn.Linear(24, 4),
        )


def adapters(method: str, layer: str) -> dict[str, object]:
    """Return what a method needs that trains adapters, in a model none of whose layers has a transformer's name."""
    return {"target": [layer]} if "target" in plugins.find("methods", method).model_fields else {}


def example(inputs: torch.Tensor, public: int = 0) -> Example:
    """A batch of one input, of the first class."""
    first = torch.zeros(len(inputs), dtype=torch.int64)
    return Example(inputs, first, plugins.make("objectives", "classification"), public)


def small_federation() -> Federation:
    """Eight clients with 6×6 images of four learnable classes; some clients lack some labels."""
    rng = np.random.default_rng(0)
    prototypes = rng.integers(0, 200, (4, 1, 6, 6))

    def draw(labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        images = prototypes[labels] + rng.integers(0, 56, (len(labels), 1, 6, 6))
        return torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(labels)

    clients = [draw(rng.choice(4 if number % 2 else 3, 20)) for number in range(8)]
    return from_arrays(clients, draw(np.arange(40) % 4))


@pytest.fixture
def federation() -> Federation:
    return small_federation()


@contextmanager
def no_figures() -> Iterator[None]:
    """Runs that leave their report without its figures, which take longer than a small run: for tests of many runs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, nothing in forked.FIGURES.items():
            patch.setattr(name, nothing)
        yield


@pytest.fixture
def without_figures() -> Iterator[None]:
    with no_figures():
        yield


@pytest.fixture(scope="module")
def forked_runs() -> Iterator[None]:
    """Comparisons in this process, whose runs are forks of it and leave their own figures out."""
    as_forks = SimpleNamespace(**{**vars(subprocess), "Popen": forked.run_of_a_comparison})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedhm.compare.execute.subprocess", as_forks)
        yield


@pytest.fixture(autouse=True)
def _names_of_one_test() -> Iterator[None]:
    """What a test makes known by a name is not known to the others."""
    before = dict(plugins._registered)
    yield
    plugins._registered.clear()
    plugins._registered.update(before)
