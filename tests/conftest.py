"""Small federations that the tests share. One thread: the tests' tensors are too small to share between cores."""

import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import forked
from fedhm.config import plugins
from fedhm.config.reading import parse
from fedhm.config.settings import Config
from fedhm.data.federation import Federation, gathered
from fedhm.work.work import Example

# Files, by their names, that are not one piece of work for one process. Those of many small runs go before other quick
# ones; each test of the next is a piece of its own; those that use transformers or scikit-learn, which take seconds to
# be imported, are one piece together.
MANY_RUNS = ("test_robust", "test_paper_sizes", "test_local_workers", "test_experiment", "test_fleet", "test_parts")
APART = ("test_quick", "test_demo", "test_simulation")
TOGETHER = (
    *("test_lora", "test_text_run", "test_objectives", "test_text_objectives", "test_regression"),
    *("test_digits", "test_huggingface", "test_tokens"),
)

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of runs and of the processes that tests start; workers only where a test asks
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; processes of tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: much of the time of slow tests passes in waiting for processes and deadlines."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    return cores if "not slow" in config.option.markexpr else cores + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files go first, and of them those that may take longest: one that began last would be waited for by all."""
    length: dict[Path, float] = {}  # seconds that a file's slow tests may take each, where one says so
    for item in items:
        if item.get_closest_marker("slow"):
            limit = item.get_closest_marker("timeout")
            length[item.path] = max(length.get(item.path, 0), limit.args[0] if limit else 0)
    items.sort(key=lambda item: -length.get(item.path, -0.5 if item.path.stem in MANY_RUNS else -1))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files side by side, but for some: tests that wait for nothing from each other, and those that import the same."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            name = Path(nodeid.partition("::")[0]).stem
            return nodeid if name in APART else "together" if name in TOGETHER else super()._split_scope(nodeid)

    return Files(config, log)


def pytest_collection_finish() -> None:
    """Modules stay anyway: the collector need not look through a million objects of theirs again and again."""
    gc.collect()
    gc.freeze()


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
    return gathered(clients, draw(np.arange(40) % 4))


@pytest.fixture
def federation() -> Federation:
    return small_federation()


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that leave their report without its figures, which take longer than a small run: for tests of many runs."""
    for name, nothing in forked.FIGURES.items():
        monkeypatch.setattr(name, nothing)


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
    before = dict(plugins._provided)
    yield
    plugins._provided.clear()
    plugins._provided.update(before)
