"""Rounds of the workload in fedhm; the arguments are the numbers of workers and of clients."""

import sys

import torch

from fedhm.assembly import assemble
from fedhm.config.loading import parse
from fedhm.config.schema import Config
from fedhm.data.federation import from_arrays
from fedhm.server.record import Record
from peers.turns import Turns
from peers.workload import BATCH, LR, ROUNDS, clients, cnn, device


def config(workers: int) -> Config:
    table = {
        "federation": {"participation": 1.0},
        "train": {"rounds": ROUNDS, "batch": BATCH, "lr": LR, "momentum": 0.0, "weight_decay": 0.0},
        "method": {"name": "fedavg"},
        "evaluation": {"every": ROUNDS},
        # merging with more threads would take the cores from the workers
        "engine": {"threads": 1, "workers": workers, "server_threads": 1, "device": str(device())},
    }
    return parse(table, "the benchmark")


class Paced:
    """A watcher that holds each round back until it is asked for."""

    def __init__(self) -> None:
        self.turns = Turns()

    def started(self, done: int, rounds: int) -> None:  # noqa: ARG002
        self._wait()

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None: ...

    def round_done(self, record: Record) -> None:  # noqa: ARG002
        self._wait()

    def _wait(self) -> None:
        if not self.turns.wait():
            raise SystemExit


def main() -> None:
    torch.set_num_threads(1)
    watcher = Paced()
    workers, count = map(int, sys.argv[1:])
    data = clients(count)
    assemble(cnn(), from_arrays(data, data[0]), config(workers), watchers=[watcher]).run()


if __name__ == "__main__":
    main()
