"""The local engine: tasks run on this machine, in this process or in several workers side by side."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import replace

import torch

from fedhm.config.schema import EngineConfig
from fedhm.engines.workers import Pool
from fedhm.errors import FedhmError
from fedhm.machine.process import raise_mmap_threshold, usable_cores
from fedhm.networks.exchange import Tensors
from fedhm.work.client import Client
from fedhm.work.messages import Reply, Task


class LocalEngine:
    """An engine on this machine, whose replies are the same to the last bit however many workers there are."""

    def __init__(self, clients: Sequence[Client], workers: int = 1, threads: int = 1) -> None:
        self._clients, self._workers, self._threads = clients, workers, threads
        self._pool: Pool | None = None
        raise_mmap_threshold()

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        if self._workers == 1:
            return self._run_here(tasks)
        # Workers that would find no task are not started; a later run that has more gets more.
        workers = min(self._workers, max(1, len(tasks))) if isinstance(tasks, Sized) else self._workers
        if self._pool is None or not self._pool.idle or self._pool.size < workers:
            self.close()
            self._pool = Pool(self._clients, workers, self._threads)
        return self._pool.run(tasks)

    def _run_here(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        for position, task in enumerate(tasks):
            # As a worker would see them: products of matrices may depend on how these lie in memory.
            task = replace(task, tensors=_contiguous(task.tensors), kept=_contiguous(task.kept))
            before = torch.get_num_threads()
            torch.set_num_threads(self._threads)
            try:
                reply = self._clients[task.client].reply(task, position)
            finally:
                torch.set_num_threads(before)
            yield reply

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def workers_for(config: EngineConfig, tasks: int) -> int:
    """Return how many workers to start for rounds of so many tasks; `config` is resolved."""
    if not hasattr(os, "fork"):
        return 1
    # Apple's libraries and CUDA may not survive a fork; and what torch compiles depends on what it compiled before, so
    # that results would depend on who did which tasks.
    alone = sys.platform == "darwin" or torch.cuda.is_available() or config.device != "cpu" or config.compile
    if config.workers == "auto":
        return 1 if alone else max(1, min(usable_cores() // config.threads, tasks))
    if config.workers > 1 and (config.device != "cpu" or config.compile):
        reason = "use compiled networks" if config.compile else f"share {config.device}"
        raise FedhmError(f"worker processes cannot {reason}: set engine.workers to 1 or 'auto'")
    return config.workers


def _contiguous(tensors: Tensors) -> Tensors:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
