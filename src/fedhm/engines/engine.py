"""Engines run a round's tasks: the protocol, and the engine of this machine. Flower's is in `fedhm.flower`."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from typing import Protocol

import torch

from fedhm.config.schema import EngineConfig
from fedhm.engines.workers import WorkerPool
from fedhm.errors import FedhmError
from fedhm.machine.device import threads
from fedhm.machine.process import raise_mmap_threshold, usable_cores
from fedhm.networks.exchange import Tensors
from fedhm.work.client import Client
from fedhm.work.messages import Reply, Task


class Engine(Protocol):
    """A map over tasks, wherever they run."""

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        """Yield one reply for each task, in any order. A reply's `position` counts the tasks from 0."""
        ...

    def close(self) -> None:
        """Release everything that was kept between runs, such as processes. Another run may follow."""
        ...


class LocalEngine:
    """Runs tasks on this machine, in this process or in worker processes.

    The replies are bit-identical for any number of workers.
    """

    def __init__(self, clients: Sequence[Client], workers: int = 1, threads: int = 1) -> None:
        self._clients, self._workers, self._threads = clients, workers, threads
        self._pool: WorkerPool | None = None
        raise_mmap_threshold()

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        if self._workers == 1:
            return self._run_here(tasks)
        # No more workers than tasks are started. A later run with more tasks gets more workers.
        workers = min(self._workers, max(1, len(tasks))) if isinstance(tasks, Sized) else self._workers
        if self._pool is None or not self._pool.idle or self._pool.size < workers:
            self.close()
            self._pool = WorkerPool(self._clients, workers, self._threads)
        return self._pool.run(tasks)

    def _run_here(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        for position, task in enumerate(tasks):
            # A worker gets contiguous tensors. Matrix products may depend on the memory layout, so use the same here.
            task = replace(task, tensors=_contiguous(task.tensors), kept=_contiguous(task.kept))
            with threads(self._threads):
                reply = self._clients[task.client].reply(task, position)
            yield reply

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class FlowerOnlyEngine:
    """Stands in for Flower's engine: the experiment can be inspected in this process, but not run."""

    SENTENCE = "engine.name = 'flower' is for 'fedhm run' and 'fedhm resume', and for Flower apps made by fedhm.flower"

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:  # noqa: ARG002
        raise FedhmError(self.SENTENCE)

    def close(self) -> None:
        """Do nothing: the engine never ran."""


def workers_for(config: EngineConfig, tasks: int) -> int:
    """Return how many workers to start for rounds of this many tasks; `config` is resolved."""
    if not hasattr(os, "fork"):
        return 1
    # Apple's libraries and CUDA may not survive a fork. Code that torch compiles depends on earlier compilations, so
    # results would depend on which worker did which tasks.
    alone = sys.platform == "darwin" or torch.cuda.is_available() or config.device != "cpu" or config.compile
    if config.workers == "auto":
        return 1 if alone else max(1, min(usable_cores() // config.threads, tasks))
    if config.workers > 1 and (config.device != "cpu" or config.compile):
        reason = "use compiled networks" if config.compile else f"share {config.device}"
        raise FedhmError(f"worker processes cannot {reason}: set engine.workers to 1 or 'auto'")
    return config.workers


def _contiguous(tensors: Tensors) -> Tensors:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
