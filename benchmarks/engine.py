"""How fast fedhm's local engine trains: against a bare PyTorch loop, and against pfl-research and Flower.

Images are random and of CIFAR-10's shape. Part 1 times `engine.run(tasks)` with one worker and one thread against a
loop over the same batches, ready in memory. Its tasks train one network each, as the loop does. Part 2 times tasks that
train a smaller network inside as well, against tasks that do not. Part 3 times whole rounds on two cores, each library
in its own process. With `--device`, everything trains there.
"""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.assembly import assemble
from fedhm.config.loading import parse
from fedhm.data.federation import Federation, from_arrays
from fedhm.data.samples import Feed
from fedhm.errors import FedhmError
from fedhm.experiment import Experiment
from fedhm.machine.device import CPU, find_device
from fedhm.methods.method import State
from fedhm.models import resnet18
from fedhm.networks.exchange import exchanged_tensors, load
from fedhm.networks.structure import channels_last
from fedhm.work.messages import Participant, Update
from measure import Ratio, arguments, interleaved, machine, median, ratio, save_json, show
from peers.process import Peer
from peers.workload import CLIENTS, SAMPLES, cnn

TIERS = ("full", "1/2", "1/4", "1/8")
KEEP = 3  # layers of a ResNet that stay dense at the start, as in the presets of CIFAR-10
PAPER = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
OURS = "fedhm, 2 workers"  # what the other libraries are measured against
PARTS = "training nesting rounds"
PFL = {"batch": 10, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}  # its CIFAR-10 benchmark's

Case = Callable[[], object]


def images(clients: int, samples: int) -> Federation:
    """Return clients with uint8 images, and as many labels of each class, so that no client's loss is masked."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 10
    pixels = torch.randint(0, 256, (clients, samples, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return from_arrays([(each, labels) for each in pixels], (pixels[0, :10], labels[:10]))


def experiment(
    model: nn.Module, data: Federation, method: dict[str, object], device: str, **train: float
) -> Experiment:
    """Put an experiment together. Nesting and Frobenius decay, which a bare loop has not, have to be asked for."""
    table = {
        "train": {"frobenius_decay": 0.0, "nested": 0.0, **train},
        "method": method,
        "engine": {"workers": 1, "threads": 1, "device": device},
    }
    return assemble(model, data, parse(table, "the benchmark"))


def start(of: Experiment, model: nn.Module) -> State:
    """Return the first state, once for all cases: decomposing a ResNet takes longer than a case."""
    state: State = of.method.start(exchanged_tensors(model))
    return state


def run_tasks(of: Experiment, state: State, tier: str, kind: str = "train") -> Case:
    """Return a case: one task of a kind for each client, in the engine."""
    method = of.method
    tasks = list(method.tasks(state, [Participant(client, tier) for client in range(of.federation.size)], 1))
    assert {task.kind for task in tasks} == {kind}

    def engine() -> None:
        for reply in of.engine.run(tasks):
            assert isinstance(reply, Update), reply

    return engine


def bare_loop(of: Experiment, state: State, data: Federation, tier: str, device: torch.device) -> Case:
    """Return a case: a bare loop over the batches of all clients."""
    train, method = of.config.train, of.method
    network = channels_last(load(method.network(method.spec(tier)), method.weights(state, tier)).to(device)).train()
    optimizer = torch.optim.SGD(network.parameters(), train.lr, train.momentum, weight_decay=train.weight_decay)
    feeds = [Feed(samples, data.preprocessing) for samples in data.clients]
    batches = [
        (inputs.to(device), targets.to(device))
        for feed in feeds
        for inputs, targets in feed.shuffled(train.batch, torch.Generator())
        if isinstance(inputs, Tensor)
    ]

    def bare() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(network(inputs), targets).backward()
            optimizer.step()

    return bare


def timed(cases: dict[str, Case], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Return seconds by case: of this process's CPU, which other processes disturb less, or until a device is done."""
    if device == CPU:
        return interleaved(cases, repeats, clock=time.process_time)

    def until_done(case: Case) -> Case:
        def run() -> None:
            case()
            torch.accelerator.synchronize(device)

        return run

    return interleaved({name: until_done(case) for name, case in cases.items()}, repeats)


def local_training(quick: bool, repeats: int, samples: int, batch: int, device: torch.device) -> dict[str, Ratio]:
    """Measure part 1: samples a second in the engine, as a share of the bare loop's."""
    width, clients, samples, batch = (0.125, 2, 20, 10) if quick else (1.0, CLIENTS, samples, batch)
    torch.manual_seed(0)
    resnet, one, fedhm = resnet18(width=width), images(1, samples), {"name": "fedhm", "keep": KEEP}
    plain = experiment(resnet, one, fedhm, str(device), batch=batch, **PAPER)
    decayed = experiment(resnet, one, fedhm, str(device), batch=batch, **PAPER, frobenius_decay=1e-4)
    small, cohort = cnn(), images(clients, SAMPLES)
    average = experiment(small, cohort, {"name": "fedavg"}, str(device), **PFL)
    begun = start(plain, resnet)
    rows = {f"ResNet-18 {tier}": (plain, begun, one, tier) for tier in TIERS}
    rows["ResNet-18 1/2, Frobenius decay"] = (decayed, begun, one, "1/2")
    rows["CNN"] = (average, start(average, small), cohort, "full")
    ratios, shown = {}, []
    for name, (of, state, data, tier) in rows.items():
        cases = {"engine": run_tasks(of, state, tier), "bare": bare_loop(of, state, data, tier, device)}
        times = timed(cases, repeats, device)
        ratios[name] = ratio(times["engine"], times["bare"])
        count = clients * SAMPLES if name == "CNN" else samples
        shown.append((name, *(f"{count / median(times[case]):.0f}" for case in cases), ratios[name]))
    show("Local training, one thread", ("network", "samples/s", "bare loop", "of bare (quartiles)"), shown)
    return ratios


def nesting(quick: bool, repeats: int, samples: int, batch: int, device: torch.device) -> dict[str, dict[str, Ratio]]:
    """Measure part 2: how many times as long a task takes that trains the smallest tier inside its network as well."""
    width, samples, batch = (0.125, 20, 10) if quick else (1.0, samples, batch)
    torch.manual_seed(0)
    resnet, one = resnet18(width=width), images(1, samples)
    prices: dict[str, dict[str, Ratio]] = {}
    for keep in KEEP, 1:
        fedhm = {"name": "fedhm", "keep": keep}
        plain, nested = (
            experiment(resnet, one, fedhm, str(device), batch=batch, **PAPER, nested=weight) for weight in (0.0, 0.5)
        )
        state = start(plain, resnet)
        for tier in TIERS[:-1]:
            inside = run_tasks(nested, state, tier, "nested")
            cases = {"plain": run_tasks(plain, state, tier), "two passes": in_two_passes(inside), "shared": inside}
            times = timed(cases, repeats, device)
            prices[f"ResNet-18 {tier}, keep = {keep}"] = {
                name: ratio(times["plain"], seconds) for name, seconds in times.items() if name != "plain"
            }
    rows = [(name, *by_case.values()) for name, by_case in prices.items()]
    show("Price of nesting: time / time without", ("network", "two full passes", "common layers run once"), rows)
    return prices


def in_two_passes(case: Case) -> Case:
    """Return a case in which a network and the one inside it share nothing."""

    def unshared() -> None:
        with patch("fedhm.work.nested.may_share", return_value=False):
            case()

    return unshared


def rounds(quick: bool, repeats: int, environment: Path, device: torch.device, only: str) -> dict[str, Ratio]:
    """Measure part 3: whole rounds, each library in a process of its own that waits for its turn.

    only  the names of the libraries that are measured; empty: all
    """
    ours = [sys.executable, "-m", "peers.fedhm_rounds"]
    clients = "4" if quick else str(CLIENTS)
    executor = [sys.executable, "-m", "peers.executor_rounds", "2", clients]
    commands = {OURS: [*ours, "2", clients], "fedhm, 1 worker": [*ours, "1", clients]}
    commands["fedhm, ProcessPoolExecutor"] = executor  # its own pool replaced by that of the standard library
    python = str(environment.absolute() / "bin" / "python")
    if quick:
        pass
    elif not Path(python).exists():
        print(f"pfl-research and Flower are not in {environment}, so they are left out: make them with `make peers`.")
    else:
        if device == CPU:  # NCCL, by which its processes talk of GPUs, wants one for each
            torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            commands["pfl, 2 processes"] = [*torchrun, "-m", "peers.pfl_rounds", "1"]
            commands["pfl, 2 threads"] = [python, "-m", "peers.pfl_rounds", "2"]
        commands["pfl, 1 thread"] = [python, "-m", "peers.pfl_rounds", "1"]
        commands["Flower, 2 actors"] = [python, "-m", "peers.flower_rounds"]
    if only:
        wanted = {OURS, *(name.strip() for name in only.split(";"))}
        if unknown := sorted(wanted - commands.keys()):
            sys.exit(f"--only: there is no {unknown[0]}, there are {'; '.join(commands)}")
        commands = {name: command for name, command in commands.items() if name in wanted}
    with ExitStack() as stack:
        peers = {name: stack.enter_context(Peer(command, str(device))) for name, command in commands.items()}
        used: dict[str, list[float]] = {name: [] for name in peers}

        def turn(name: str) -> None:
            before = peers[name].cpu_seconds()
            peers[name].round()
            used[name].append(peers[name].cpu_seconds() - before)

        times = interleaved({name: partial(turn, name) for name in peers}, repeats, warmup=1 if quick else 2)
    ours_of = {"by the clock": times, "in CPU seconds": {name: each[-repeats:] for name, each in used.items()}}
    ratios = {
        f"{name}, {how}": ratio(seconds[OURS], seconds[name])
        for how, seconds in ours_of.items()
        for name in seconds
        if name != OURS and all(seconds[OURS])
    }
    rows = [
        (
            name,
            *(median(seconds[name]) for seconds in ours_of.values()),
            *(ratios.get(f"{name}, {how}", 1) for how in ours_of),
        )
        for name in peers
    ]
    title = f"Rounds of {clients} clients × {SAMPLES} samples, CNN: fedhm with 2 workers is … times as fast (quartiles)"
    show(title, ("library", "seconds a round", "CPU seconds", *ours_of), rows)
    return ratios


def main() -> None:
    options = arguments(
        __doc__,
        repeats=(7, "how often each case is measured"),
        samples=(128, "of the client that trains a ResNet"),
        batch=(64, "of the ResNets"),
        device=("cpu", "where all networks train, such as cuda"),
        peers=(Path(".venv-peers"), "the environment with pfl-research and Flower"),
        parts=(PARTS, "what is measured, some of these words"),
        only=("", "of the last part: names of libraries as its table has them, with ';' between them; empty: all"),
    )
    if unknown := sorted(set(options.parts.split()) - set(PARTS.split())):
        sys.exit(f"--parts: there is no '{unknown[0]}', there are {PARTS}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that peers are ended then too
    torch.set_num_threads(1)
    try:
        device = find_device(options.device)
    except FedhmError as error:
        sys.exit(str(error))
    repeats = 1 if options.quick else options.repeats
    print(machine() if device == CPU else f"{machine()}, {device}")
    sizes = options.quick, repeats, options.samples, options.batch, device
    results: dict[str, object] = {}
    if "training" in options.parts:
        results["of_bare"] = local_training(*sizes)
    if "nesting" in options.parts:
        results["price_of_nesting"] = nesting(*sizes)
    if "rounds" in options.parts:
        results["two_workers_against"] = rounds(options.quick, repeats, options.peers, device, options.only)
    save_json(options.json, {"quick": options.quick, "device": str(device), **results})


if __name__ == "__main__":
    main()
