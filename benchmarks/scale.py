"""How rounds grow with the number of clients, and the server's merge with the width of a layer.

clients  a small CNN on 8×8 images, 6 samples a client, one epoch, tiers 1, 1/2 and 1/4; all clients take part in every
         round. CPU seconds of a round after the first; the peak memory of the process, less that of an idle one.
         `server` is the same round with clients that send back what they got: what the server itself spends.
layers   FedHM.merge of 4 factored updates for one n×n layer at rank n/4, in the round after the first.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from fedhm.assembly import assemble
from fedhm.config.schema import Config
from fedhm.data.federation import from_arrays
from fedhm.experiment import Experiment
from fedhm.methods.fedhm import FedHM, FedHMConfig, FedHMState
from fedhm.methods.method import Setup
from fedhm.models import cnn
from fedhm.networks.exchange import exchanged_tensors
from fedhm.work.messages import Participant, Task, Update
from fedhm.work.work import work_of
from measure import arguments, machine, median, peak_memory, save_json, show
from scale_plot import plot

SAMPLES = 6
Numbers = dict[str, float]


class Echo:
    """An engine without training: clients send back what they got."""

    def run(self, tasks: Iterable[Task]) -> Iterator[Update]:
        for position, t in enumerate(tasks):
            back = work_of(t.kind).loaded(t)
            yield Update(t.kind, t.round, t.client, t.tier, t.network, back, SAMPLES, None, 1.0, position)

    def close(self) -> None: ...


def rounds(clients: int, count: int) -> Numbers:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (clients, SAMPLES, 1, 8, 8), dtype=torch.uint8, generator=generator)
    y = torch.randint(10, (clients, SAMPLES), generator=generator)
    settings = {
        "federation": {"clients": clients, "participation": 1.0},
        "train": {"rounds": 1 + count, "lr": 0.01, "masked_loss": False},
        "method": {"tiers": [1, "1/2", "1/4"]},
        "evaluation": {"every": 1 + count, "static_from": "never"},
        "engine": {"workers": 1, "threads": 1, "server_threads": 1},
    }
    torch.manual_seed(0)
    start = time.process_time()
    federation = from_arrays([*zip(x, y, strict=True)], (x[0], y[0]))
    config, model = Config.model_validate(settings), cnn(width=1 / 8)
    experiment = assemble(model, federation, config)
    setup = time.process_time() - start
    server = assemble(model, federation, config, Echo())
    return {"setup": setup, "server": later_rounds(server), "seconds": later_rounds(experiment)}


class Clock:
    """A watcher that counts each round's CPU time: with one thread it does not depend on who else uses the machine."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def started(self, *_: object) -> None:
        self.ends.append(time.process_time())

    def task_done(self, *_: object) -> None:
        return

    def round_done(self, _: object) -> None:
        self.ends.append(time.process_time())


def later_rounds(experiment: Experiment) -> float:
    clock = Clock()
    experiment.watchers = [clock]
    experiment.run()
    return median(end - start for start, end in pairwise(clock.ends[1:]))


def merge(width: int, count: int) -> Numbers:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, 10))
    method = FedHM(model, FedHMConfig(tiers=(0.25,), keep=0), Setup(classifier="2"))
    begin = time.process_time()
    state = method.start(exchanged_tensors(model))
    start = time.process_time() - begin
    seconds: list[float] = []
    for number in range(1, 2 + count):
        updates = trained(method, state, number)
        begin = time.process_time()
        state = method.merge(state, updates, number)
        seconds.append(time.process_time() - begin)
    return {"start": start, "seconds": median(seconds[1:])}


def trained(method: FedHM, state: FedHMState, number: int) -> list[Update]:
    """Return what four clients send back: their task's tensors, moved by a hundredth."""
    updates = []
    for task in method.tasks(state, [Participant(client, "1/4") for client in range(4)], number):
        moved = {name: t + 0.01 * t.std() * torch.randn_like(t) for name, t in task.tensors.items()}
        updates.append(Update("train", number, task.client, task.tier, task.network, moved, SAMPLES, None, 1.0))
    return updates


def in_a_process(case: Callable[[], Numbers], idle: float) -> Numbers:
    """Run a case in a process and return its numbers, with its peak memory beyond an idle process, in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "numbers"
        memory = peak_memory(lambda: file.write_text(json.dumps(case()), encoding="utf-8"))
        return {**json.loads(file.read_text(encoding="utf-8")), "memory": memory - idle}


def grown(sizes: Sequence[int], case: Callable[[int], Numbers], idle: float) -> dict[int, Numbers]:
    found = {}
    for size in sizes:
        found[size] = in_a_process(partial(case, size), idle)
        print(size, {name: round(value, 3) for name, value in found[size].items()}, flush=True)
    return found


def slope(numbers: dict[int, Numbers], what: str) -> list[str]:
    """Return by which power of the size a number grows, from each size to the next."""
    sizes = sorted(numbers)
    return ["", *(f"{math.log(numbers[b][what] / numbers[a][what]) / math.log(b / a):.2f}" for a, b in pairwise(sizes))]


def main() -> None:
    asked = arguments(
        __doc__,
        clients=("10,100,1000,10000", "numbers of clients"),
        widths=("256,512,1024,2048,4096", "widths of the layer"),
        repeats=(2, "rounds that are timed"),
        plot=("", "draw the figure into this file"),
    )
    torch.set_num_threads(1)
    counts, widths = ([int(part) for part in text.split(",")] for text in (asked.clients, asked.widths))
    repeats = asked.repeats
    if asked.quick:
        counts, widths, repeats = [5, 20], [64, 128], 1
    print(machine())
    idle = peak_memory(lambda: None)
    clients = grown(counts, partial(rounds, count=repeats), idle)
    layers = grown(widths, partial(merge, count=repeats), idle)
    rows = [
        [size, f["seconds"], 1e3 * f["seconds"] / size, power, 1e3 * f["server"] / size, f["setup"], round(f["memory"])]
        for (size, f), power in zip(clients.items(), slope(clients, "seconds"), strict=True)
    ]
    columns = ["clients", "s/round", "ms/client", "power", "of it server", "s setup", "MiB"]
    show("A round of so many clients", columns, rows)
    rows = [
        [size, f["seconds"], power, f["start"], round(f["memory"])]
        for (size, f), power in zip(layers.items(), slope(layers, "seconds"), strict=True)
    ]
    show("The server's merge of one layer", ["width", "s/merge", "power", "s/start", "MiB"], rows)
    if asked.plot:
        plot(asked.plot, clients, layers)
    save_json(asked.json, {"clients": clients, "layers": layers})


if __name__ == "__main__":
    main()
