"""`fedhm check-device` compares a device with the CPU in a few minutes, for a look before long runs or a bug report."""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fedhm.cli.options import Verbs, terminal

if TYPE_CHECKING:
    import torch

    from fedhm.experiment import Experiment
    from fedhm.report.sheets import Sheet

SAME_RUN = [
    *("data.train_samples=800", "federation.clients=4", "federation.participation=1.0", "train.rounds=3"),
    *("train.epochs=1", "train.milestones=[]", "evaluation.every=3", "engine.workers=1"),
]
CLIENTS, SAMPLES = 8, 128  # random images of the speed test
SPEED_PRESET = "cifar10-resnet10"
QUICK_SAMPLES = 24
LONG = 5.0  # seconds of one measurement, which is then not repeated: the check is to end within five minutes
PRECISIONS = ("float32", "bf16", "fp16")


def add_check_device(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "check-device",
        help="compare a device with the CPU: numbers, speed, memory, the fastest workers and precision",
        description="Do the same small run on the CPU and on the device, and measure every tier on random images. "
        "It takes up to five minutes. The tables can be pasted into a bug report.",
    )
    parser.add_argument("device", nargs="?", default="auto", metavar="DEVICE", help="such as cuda:1 (default: auto)")
    parser.add_argument("--quick", action="store_true", help="fewer samples: numbers of speed mean little")
    parser.set_defaults(action=check_device, imports="fedhm.run")


def check_device(options: argparse.Namespace) -> None:
    import torch

    import fedhm
    from fedhm.machine.device import find_device
    from fedhm.report.sheets import markdown_table

    device = find_device(options.device)
    samples = QUICK_SAMPLES if options.quick else SAMPLES
    console = terminal()
    console.print(f"fedhm {fedhm.__version__}, torch {torch.__version__}, {device}\n", highlight=False)
    # workers come first: they are forked, which must happen before this process uses the device
    for measure in (partial(_workers, device, samples), partial(_same_run, device), partial(_speed, device, samples)):
        console.print(markdown_table(measure()), highlight=False, soft_wrap=True, markup=False)


def _say(what: str) -> None:
    """Say what is measured now, on stderr: tables alone go to a file."""
    print(f"measuring {what} …", file=sys.stderr, flush=True)


def _same_run(device: "torch.device") -> "Sheet":
    """Return the metrics of one small run on both devices."""
    from fedhm.config.loading import load_config
    from fedhm.report.sheets import Sheet
    from fedhm.run import prepare

    _say("the same run on both devices")
    found = [
        prepare(load_config("digits", [*SAME_RUN, f"engine.device={name}"])).run().records[-1].metrics
        for name in ("cpu", str(device))
    ]
    rows = [
        [tier, f"{100 * on_cpu.accuracy:.1f}", f"{100 * there.accuracy:.1f}", *_losses(on_cpu["loss"], there["loss"])]
        for tier, on_cpu, there in ((tier, found[0][tier], found[1][tier]) for tier in found[0])
    ]
    columns = ["tier", "CPU, %", f"{device}, %", "CPU, loss", f"{device}, loss", "difference"]
    return Sheet(columns, [rows], left=1, title="The same run: digits, three rounds")


def _losses(one: float, other: float) -> list[str]:
    return [f"{one:.5f}", f"{other:.5f}", f"{abs(one - other):.1e}"]


def _speed(device: "torch.device", samples: int) -> "Sheet":
    """Return samples a second of every tier beside a bare loop, the price of nesting, precisions, and memory."""
    from fedhm.measure.cost import configured_training_memory
    from fedhm.report.format import format_bytes
    from fedhm.report.sheets import Sheet

    plain = _experiment(device, samples, ["train.nested=0"])
    others = {name: _experiment(device, samples, ["train.nested=0", f"train.precision={name}"]) for name in PRECISIONS}
    nested = _experiment(device, samples, [])
    rows = []
    for tier in plain.method.tiers:
        _say(f"tier {tier}")
        bare = _bare_loop(plain, tier, device, samples)
        before = _forget_peak(device)
        own = _train(plain, tier, samples)  # brings the tier's network to the device
        taken = _peak(device) - before
        network, train = plain.method.network(plain.method.spec(tier)), plain.config.train
        predicted = configured_training_memory(network, plain.federation.input_shape, train)
        speeds = {name: _train(other, tier, samples) for name, other in others.items() if name != "float32"}
        fastest = max({"float32": own, **speeds}.items(), key=lambda each: each[1])[0]
        rows.append(
            [
                *(tier, f"{own:.0f}", f"{bare:.0f}", f"{own / bare:.2f}", f"{_train(nested, tier, samples):.0f}"),
                *(f"{speed:.0f}" for speed in speeds.values()),
                *(fastest, format_bytes(predicted), format_bytes(taken) if taken else "–"),
            ]
        )
    columns = ["tier", "samples/s", "bare loop", "ratio", "with nesting", "bf16", "fp16", "fastest"]
    return Sheet(
        [*columns, "predicted memory", "measured"],
        [rows],
        left=1,
        title=f"Training on {device}: {SPEED_PRESET}, batches of {plain.config.train.batch}",
        note="The bare loop is plain PyTorch over batches that lie on the device. Predicted is the memory of a "
        "training step, and measured what a task adds on the device. Torch counts none on CPUs and MPS.",
    )


def _workers(device: "torch.device", samples: int) -> "Sheet":
    """Return samples a second of a round by the number of workers."""
    from fedhm.machine.process import in_child, usable_cores
    from fedhm.report.sheets import Sheet

    numbers = [number for number in (1, 2, 4) if number == 1 or number <= usable_cores()]
    speeds = {}
    for number in numbers:
        _say(f"a round with workers: {number}")
        microseconds = in_child(partial(_round_microseconds, device, samples, number))
        speeds[number] = 1e6 * CLIENTS * samples / microseconds if microseconds else 0.0
    rows = [[str(number), f"{speed:.0f}" if speed else "–"] for number, speed in speeds.items()]
    title = f"A round of {CLIENTS} clients on {device}"
    return Sheet(["workers", "samples/s"], [rows], left=1, title=title, note=_fastest_workers(speeds))


def _fastest_workers(speeds: Mapping[int, float]) -> str:
    """Return a sentence that names the fastest number of workers; a speed of 0 could not be measured."""
    fastest = max(speeds, key=lambda number: speeds[number])
    if not speeds[fastest]:
        return "No number of workers could be measured."
    return f"Fastest: engine.workers = {fastest}."


def _round_microseconds(device: "torch.device", samples: int, workers: int) -> int:
    from fedhm.server.record import Record

    experiment = _experiment(device, samples, [f"engine.workers={workers}"])
    state = experiment.method.start(experiment.initial)
    try:
        first = _seconds(partial(experiment.train_round, state, Record(1)))
        again = first if first > LONG else _seconds(partial(experiment.train_round, state, Record(2)))
        return int(1e6 * min(first, again))
    finally:
        experiment.engine.close()


def _experiment(device: "torch.device", samples: int, changes: Sequence[str]) -> "Experiment":
    """Return an experiment on random images, all of whose clients take part."""
    import torch

    from fedhm.assembly import assemble
    from fedhm.config.loading import load_config
    from fedhm.data.federation import from_arrays
    from fedhm.models.build import build_model

    common = [f"federation.clients={CLIENTS}", "federation.participation=1", f"engine.device={device}"]
    config = load_config(SPEED_PRESET, [*common, "engine.workers=1", "server.optimizer=none", *changes])
    generator = torch.Generator().manual_seed(0)

    def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return pixels, torch.arange(count) % 10

    assert config.data is not None
    clients, test = [images(samples) for _ in range(CLIENTS)], images(samples)
    federation = from_arrays(clients, test, crop=config.data.crop, flip=config.data.flip)
    return assemble(build_model(config, (3, 32, 32), 10), federation, config)


def _train(experiment: "Experiment", tier: str, samples: int) -> float:
    """Return the samples a second of a client's task, as a run does it."""
    from fedhm.work.messages import Participant

    state = experiment.method.start(experiment.initial)
    tasks = list(experiment.method.tasks(state, [Participant(0, tier)], 1))
    return samples / _fastest(lambda: list(experiment.engine.run(tasks)))


def _bare_loop(experiment: "Experiment", tier: str, device: "torch.device", samples: int) -> float:
    """Return the samples a second of a plain loop over one epoch of batches on the device."""
    import torch
    from torch.nn.functional import cross_entropy

    from fedhm.machine.device import threads

    train = experiment.config.train
    network: Any = experiment.method.network(experiment.method.spec(tier))
    network = network.to(device=device, memory_format=torch.channels_last).train()
    inputs = torch.randn(samples, 3, 32, 32).contiguous(memory_format=torch.channels_last).to(device)
    targets = (torch.arange(samples) % 10).to(device)
    optimizer = torch.optim.SGD(network.parameters(), train.lr, train.momentum, weight_decay=train.weight_decay)

    def epoch() -> float:
        loss = torch.zeros(())
        for start in range(0, samples, train.batch):
            optimizer.zero_grad()
            loss = cross_entropy(network(inputs[start : start + train.batch]), targets[start : start + train.batch])
            loss.backward()
            optimizer.step()
        return loss.item()  # waits for the device

    with threads(experiment.config.engine.threads):
        return samples / _fastest(epoch)


def _fastest(work: Callable[[], Any]) -> float:
    """Return the seconds of the faster of two times, after one that loads libraries; if that is long, its own."""
    first = _seconds(work)
    return first if first > LONG else min(_seconds(work) for _ in range(2))


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _memory_counter(device: "torch.device") -> Any:
    """Return torch's module of the device; None if it does not count memory."""
    import torch

    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def _forget_peak(device: "torch.device") -> int:
    """Begin to look for the most memory that is taken, and return how many bytes are taken now."""
    counter = _memory_counter(device)
    if counter is None:
        return 0
    counter.reset_peak_memory_stats(device)
    return int(counter.memory_allocated(device))


def _peak(device: "torch.device") -> int:
    """Return the most bytes of tensors on the device since the last `_forget_peak`; 0 if torch does not count them."""
    counter = _memory_counter(device)
    return 0 if counter is None else int(counter.max_memory_allocated(device))
