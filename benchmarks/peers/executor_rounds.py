"""The same rounds, with the pool of the standard library in place of fedhm's own: what its lines are worth."""

import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import torch

from fedhm.assembly import assemble
from fedhm.data.federation import from_arrays
from fedhm.engines.engine import LocalEngine
from fedhm.work.client import Client
from fedhm.work.messages import Reply, Task
from peers.fedhm_rounds import Paced, config
from peers.workload import clients, cnn

AHEAD = 2  # tasks under way for each worker
_clients: Sequence[Client] = ()  # of the forked processes


def _answer(task: Task, position: int) -> Reply:
    return _clients[task.client].reply(task, position)


class ExecutorEngine:
    """Tasks and replies are pickled, and torch puts their tensors into shared memory."""

    def __init__(self, of: Sequence[Client], workers: int) -> None:
        global _clients
        _clients, self._workers = of, workers
        fork = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(workers, fork, torch.set_num_threads, (1,))

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        waiting, under_way = list(enumerate(tasks)), set[Future[Reply]]()
        while waiting or under_way:
            while waiting and len(under_way) < AHEAD * self._workers:
                position, task = waiting.pop(0)
                under_way.add(self._pool.submit(_answer, task, position))
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for each in done:
                yield each.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def main() -> None:
    torch.set_num_threads(1)
    workers, count = map(int, sys.argv[1:])
    data, watcher = clients(count), Paced()
    experiment = assemble(cnn(), from_arrays(data, data[0]), config(1), watchers=[watcher])
    assert isinstance(experiment.engine, LocalEngine)
    experiment.engine = ExecutorEngine(experiment.engine._clients, workers)
    experiment.run()


if __name__ == "__main__":
    main()
