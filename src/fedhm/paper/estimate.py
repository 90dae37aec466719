"""How long runs would take on this machine: some training steps of every distinct network, measured in this process.

The steps are those of a client's own work, on random images. With p participants of s samples each and w workers,

    round       = p · local steps · step / w + merge                              step: mean over the capability levels
    evaluation  = Σ over tiers: test samples · forward + p · s · forward / w      the second term for static BatchNorm

No data set is read: its size is the published one, or `data.train_samples`.
"""

import heapq
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import torch
from rich.console import Console
from torch import Tensor

from fedhm.assembly import Design, make_client, named_design
from fedhm.compare.execute import Cell, check_folder
from fedhm.config.schema import ResolvedConfig
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.machine.device import find_device, threads
from fedhm.networks.exchange import Tensors, exchanged_tensors, load
from fedhm.networks.inputs import require_tensor
from fedhm.networks.reuse import NetworkPool
from fedhm.paper.numbers import TABLE_4, DataName
from fedhm.report.sheets import Sheet
from fedhm.work.evaluate import evaluate
from fedhm.work.messages import Participant, Task, Update
from fedhm.work.work import steps_in_round

# Other processes make a step slower, never faster: so the fastest of TIMES measurements of STEPS steps counts. Steps
# that take longer than SLOW seconds are precise enough at the first time.
STEPS, TIMES, SLOW = 4, 3, 2.0

Shape = tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]  # kind of work, names and shapes of tensors


@dataclass(frozen=True)
class RunEstimate:
    """The seconds that parts of a run take."""

    rounds: int
    evaluations: int
    static_evaluations: int
    train_round: float
    merge: float
    evaluation: float
    statistics: float

    @property
    def seconds(self) -> float:
        return (
            self.rounds * (self.train_round + self.merge)
            + self.evaluations * self.evaluation
            + self.static_evaluations * self.statistics
        )


@dataclass
class Stopwatch:
    """Measures training steps and forward passes, of each distinct network once."""

    data: DataName
    steps: dict[Shape, tuple[float, Update]] = field(default_factory=dict)
    forwards: dict[Shape, float] = field(default_factory=dict)

    def estimate(self, config: ResolvedConfig) -> RunEstimate:
        """Return the parts of a run with these settings."""
        design, paper = named_design(config), TABLE_4[self.data]
        assert config.data is not None  # presets name their data
        train = config.data.train_samples or paper.samples_per_client * paper.clients
        samples = train // config.federation.clients
        participants = config.federation.per_round(config.federation.clients)
        workers = min(participants, config.engine.workers if isinstance(config.engine.workers, int) else participants)
        method = design.method
        state = method.start(exchanged_tensors(design.model))
        steps = steps_in_round(config.train, samples)
        # every level, and as many clients as take part in a round
        clients = [
            [
                self._step(config, design, task)
                for task in method.tasks(state, [Participant(number, level)], config.train.rounds)
            ]
            for number, level in zip(range(max(participants, len(method.levels))), cycle(method.levels), strict=False)
        ]
        step = statistics.fmean(sum(seconds for seconds, _ in client) for client in clients[: len(method.levels)])
        updates = [update for client in clients[:participants] for _, update in client]
        with threads(config.engine.server_threads):
            merge = _seconds(lambda: method.merge(state, iter(updates), 1))
            forward = sum(self._forward(config, design, tier, method.weights(state, tier)) for tier in method.tiers)
        evaluated = [n for n in range(1, config.train.rounds + 1) if n % config.evaluation.every == 0]
        evaluated += [] if config.train.rounds in evaluated else [config.train.rounds]
        first = config.evaluation.gathers_after
        static = [] if first is None else [number for number in evaluated if number > first]
        return RunEstimate(
            rounds=config.train.rounds,
            evaluations=len(evaluated),
            static_evaluations=len(static),
            train_round=participants * steps * step / workers,
            merge=merge,
            evaluation=paper.test_samples * forward,
            statistics=participants * samples * forward / workers,
        )

    def _step(self, config: ResolvedConfig, design: Design, task: Task) -> tuple[float, Update]:
        """Return the seconds of a training step, and an update."""
        key = _key(task.kind, task.tensors)
        if key not in self.steps:
            one_epoch = config.train.model_copy(update={"epochs": 1, "iterations": 0})
            once = config.model_copy(update={"train": one_epoch})
            networks = NetworkPool(design.method.network, find_device(config.engine.device), config.engine.compile)

            def train(steps: int) -> tuple[float, Update]:
                samples, preprocessing = _images(config, design, steps * config.train.batch)
                client = make_client(samples, preprocessing, networks, once, None)
                began = time.perf_counter()
                update = client.run(task)
                return (time.perf_counter() - began) / steps, update

            with threads(config.engine.threads):
                self.steps[key] = train(1)  # torch loads libraries at their first use
                if self.steps[key][0] < SLOW:
                    self.steps[key] = min((train(STEPS) for _ in range(TIMES)), key=lambda found: found[0])
        seconds, update = self.steps[key]
        return seconds, Update(
            *(task.kind, task.round, task.client, task.tier, task.network, update.tensors),
            *(update.samples, update.labels, update.loss),
        )

    def _forward(self, config: ResolvedConfig, design: Design, tier: str, weights: Tensors) -> float:
        """Return the seconds of one sample in evaluation."""
        key = _key(f"evaluate {design.method.spec(tier)}", weights)
        if key not in self.forwards:
            network = load(design.method.network(design.method.spec(tier)), weights)
            batch = config.evaluation.batch
            samples, preprocessing = _images(config, design, batch)
            feed = Feed(samples, preprocessing, find_device(config.engine.device))
            evaluate(network, feed, batch, config.objective)
            fastest = min(_seconds(lambda: evaluate(network, feed, batch, config.objective)) for _ in range(2))
            self.forwards[key] = fastest / batch
        return self.forwards[key]


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _key(kind: str, tensors: Tensors) -> Shape:
    return kind, tuple((name, tuple(tensor.shape)) for name, tensor in sorted(tensors.items()))


def _images(config: ResolvedConfig, design: Design, count: int) -> tuple[Samples, Preprocessing]:
    """Return random images of the right shape, and the preprocessing of the settings."""
    shape = require_tensor(design.sample, "an estimate").shape[1:]
    assert config.data is not None
    pixels: Tensor = torch.randint(0, 256, (count, *shape), dtype=torch.uint8)
    images = pixels.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        outputs = design.model(torch.zeros(2, *shape)).shape[-1]
    channels = shape[0]
    normal = Preprocessing((0.5,) * channels, (0.25,) * channels, config.data.crop, config.data.flip)
    return Samples(images, torch.arange(count) % outputs), normal


def estimate_sheet(cells: Sequence[Cell], data: DataName, jobs: int, console: Console) -> Sheet:
    """Measure, and return how long each entry and all missing runs would take."""
    for cell in cells:
        check_folder(cell)  # a run with other settings would be refused
    stopwatch, found = Stopwatch(data), dict[str, RunEstimate]()
    for cell in cells:
        if cell.entry.label not in found:
            console.print(f"measuring {cell.entry.label}", highlight=False, markup=False)
            found[cell.entry.label] = stopwatch.estimate(cell.config)
    rows: list[list[str]] = []
    for label, of_entry in found.items():
        own = [cell for cell in cells if cell.entry.label == label]
        left = sum(_left(cell, of_entry) for cell in own)
        round_seconds = of_entry.train_round + of_entry.merge
        rows.append([label, _duration(round_seconds), _duration(of_entry.seconds), str(len(own)), _duration(left)])
    whole = schedule([_left(cell, found[cell.entry.label]) for cell in cells], jobs)
    total = [["all", "", "", str(len(cells)), _duration(whole)]]
    config, paper = cells[0].config, TABLE_4[data]
    assert config.data is not None
    train = config.data.train_samples or paper.samples_per_client * paper.clients
    note = (
        f"Measured: {len(stopwatch.steps)} distinct networks in training, alone on this machine. All: {jobs} at a "
        f"time. It counts {train:,} training and {paper.test_samples:,} test samples. Start-up and reading the data "
        "are not included, and runs side by side may slow each other down."
    )
    columns = ["entry", "a round", "a run", "runs", "still to do"]
    return Sheet(columns, [rows, total], left=1, title="Estimated time", note=note)


def _left(cell: Cell, whole: RunEstimate) -> float:
    """Return the seconds of the rounds that a run still has to do."""
    return 0.0 if cell.complete else whole.seconds * max(0, whole.rounds - cell.rounds_done) / whole.rounds


def schedule(seconds: Sequence[float], jobs: int) -> float:
    """Return the time until all runs are done, if each begins as soon as one of the jobs is free."""
    free = [0.0] * max(1, min(jobs, len(seconds)))
    for each in seconds:
        heapq.heappush(free, heapq.heappop(free) + each)
    return max(free)


def _duration(seconds: float) -> str:
    """Return a time in words: 40 s, 12 min, 3.5 h, 2.1 days."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
