"""How tests are collected and shared between processes. What they have in common to run on is in `small.py`."""

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

# Some virtual machines announce AMX, by which oneDNN multiplies 16-bit floats, and end the process that uses it by an
# illegal instruction. All else is as without; processes of tests inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

words = " ".join(sys.argv) + " "
hands_out = " -n" in words and " -n 0 " not in words and " -n0 " not in words
if "PYTEST_XDIST_WORKER" in os.environ or not hands_out:  # that process would wait for torch before it begins
    from small import (  # noqa: F401
        _names_of_one_test,
        adapters,
        example,
        federation,
        forked_runs,
        no_figures,
        small_config,
        small_federation,
        small_model,
        without_figures,
    )

# Files, by their names, that are not one piece of work for one process. Those of many small runs go before other quick
# ones; each test of the next is a piece of its own; those that use transformers, scikit-learn or dp-accounting, which
# take seconds to be imported, are one piece together.
MANY_RUNS = ("test_robust", "test_paper_sizes", "test_local_workers", "test_experiment", "test_fleet", "test_parts")
APART = ("test_quick", "test_demo", "test_simulation")
TOGETHER = (
    *(
        "test_lora",
        "test_minilm_adapters",
        "test_progress",
        "test_heads",
        "test_text_limits",
        "test_text_run",
        "test_objectives",
        "test_text_objectives",
        "test_regression",
    ),
    *("test_digits", "test_huggingface", "test_tokens"),
    *("test_private_runs", "test_mechanism", "test_refused", "test_audit", "test_private_flower"),
)

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
