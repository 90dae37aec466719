"""Engines run a round's tasks: the protocol, and the engine of this machine. Flower's is in `fedhm.flower`."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from typing import Protocol

import torch

from fedhm.config.schema import EngineConfig
from fedhm.engines.masks import masks_without_waiting
from fedhm.engines.workers import WorkerPool
from fedhm.errors import FedhmError
from fedhm.machine.device import CPU, find_device, free_memory, is_in_use, threads
from fedhm.machine.process import in_child, raise_mmap_threshold, usable_cores
from fedhm.networks.exchange import Tensors
from fedhm.work.client import Client
from fedhm.work.messages import Reply, Task

MEMORY_OF_WORKER = 2 << 30  # bytes of an accelerator for each worker: its context, a network in training, samples
MOST_ON_DEVICE = 4  # workers of an accelerator: more take turns rather than overlap


class Engine(Protocol):
    """A map over tasks, wherever they run."""

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        """Yield one reply for each task, in any order. A reply's `position` counts the tasks from 0."""
        ...

    def close(self) -> None:
        """Release everything that was kept between runs, such as processes. Another run may follow."""
        ...


class LocalEngine:
    """Runs tasks on this machine, in this process or in worker processes, which share the devices.

    The replies are bit-identical for any number of workers and of devices of one kind.
    """

    def __init__(
        self, clients: Sequence[Client], workers: int = 1, threads: int = 1, devices: Sequence[torch.device] = (CPU,)
    ) -> None:
        self._clients, self._workers, self._threads, self._devices = clients, workers, threads, devices
        # Clients' networks and a frozen base are on an accelerator already. And it does not survive a fork: a process
        # that has workers must not use it.
        self.evaluates = devices[0] != CPU
        self._pool: WorkerPool | None = None
        raise_mmap_threshold()

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        if self._workers == 1:
            return self._run_here(tasks)
        # No more workers than tasks are started. A later run with more tasks gets more workers.
        workers = min(self._workers, max(1, len(tasks))) if isinstance(tasks, Sized) else self._workers
        if self._pool is None or not self._pool.idle or self._pool.size < workers:
            self.close()
            self._pool = WorkerPool(self._clients, workers, self._threads, self._devices)
        return self._pool.run(tasks)

    def _run_here(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        for position, task in enumerate(tasks):
            # A worker gets contiguous tensors. Matrix products may depend on the memory layout, so use the same here.
            task = replace(task, tensors=_contiguous(task.tensors), kept=_contiguous(task.kept))
            with threads(self._threads), masks_without_waiting(self._devices[0]):
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


def find_devices(config: EngineConfig) -> list[torch.device]:
    """Return the devices that share a round's tasks."""
    names = config.devices or (config.device,)
    found = [find_device(name) for name in names]
    if len({device.type for device in found}) > 1 or len(set(found)) < len(found):
        raise FedhmError(f"engine.devices must name different devices of one kind, not {', '.join(names)}")
    return found


def workers_for(engine: EngineConfig, tasks: int, *, server_trains: bool = False) -> int:
    """Return how many workers to start for rounds of this many tasks; `engine` is resolved."""
    devices = find_devices(engine)
    accelerated = devices[0] != CPU
    # Apple's libraries may not survive a fork. Code that torch compiles depends on earlier compilations, so results
    # would depend on which worker did which tasks. A process that has trained cannot fork workers for an accelerator.
    reason = ""
    if not hasattr(os, "fork"):
        reason = "be started on this system"
    elif sys.platform == "darwin" and (accelerated or engine.workers == "auto"):
        reason = f"share {devices[0]}"
    elif engine.compile:
        reason = "use compiled networks"
    elif accelerated and is_in_use(devices[0]):
        reason = f"share {devices[0]}, which this process has used already"
    elif accelerated and server_trains:
        reason = f"share {devices[0]} with a server that trains, too"
    if not reason:
        if engine.workers != "auto":
            return max(engine.workers, len(devices))
        if not accelerated and torch.cuda.is_available():
            return 1  # if this process has trained before, torch has begun to use CUDA, which breaks a fork
        most = len(devices) * _workers_per_device(devices[0]) if accelerated else usable_cores() // engine.threads
        return max(len(devices), min(most, tasks), 1)
    if len(devices) > 1 or (engine.workers != "auto" and engine.workers > 1 and hasattr(os, "fork")):
        which = "one of engine.devices" if len(devices) > 1 else "engine.workers = 1 or 'auto'"
        raise FedhmError(f"worker processes cannot {reason}: set {which}")
    return 1


def _workers_per_device(device: torch.device) -> int:
    """Return how many workers an accelerator has memory for. A forked process looks: this one must not touch it."""
    free = in_child(lambda: free_memory(device))
    return max(1, min(free // MEMORY_OF_WORKER, MOST_ON_DEVICE, usable_cores()))


def _contiguous(tensors: Tensors) -> Tensors:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
