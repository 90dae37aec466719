"""How fast fedhm's local engine trains: against a bare PyTorch loop, and against pfl-research and Flower.

Images are random and of CIFAR-10's shape. Part 1 times `engine.run(tasks)` with one worker and one thread against a
loop over the same batches, ready in memory. Part 2 times whole rounds on two cores, each library in its own process.
"""

import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from fedhm.assembly import assemble
from fedhm.config.loading import parse
from fedhm.data.federation import Federation, from_arrays
from fedhm.data.samples import Batch, Feed
from fedhm.experiment import Experiment
from fedhm.models import resnet18
from fedhm.networks.exchange import exchanged_tensors, load
from fedhm.networks.structure import channels_last
from fedhm.work.messages import Participant, Update
from measure import Ratio, arguments, interleaved, machine, median, ratio, save_json, show
from peers.process import Peer
from peers.workload import CLIENTS, SAMPLES, cnn

TIERS = ("full", "1/2", "1/4", "1/8")
PAPER = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
PFL = {"batch": 10, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}  # its CIFAR-10 benchmark's

Case = Callable[[], object]


def images(clients: int, samples: int) -> Federation:
    """Return clients with uint8 images, and as many labels of each class, so that no client's loss is masked."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 10
    pixels = torch.randint(0, 256, (clients, samples, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return from_arrays([(each, labels) for each in pixels], (pixels[0, :10], labels[:10]))


def experiment(model: nn.Module, data: Federation, method: str, **train: float) -> Experiment:
    """Put an experiment together. Frobenius decay, which a bare loop has not, is off unless it is asked for."""
    table = {
        "train": {"frobenius_decay": 0.0, **train},
        "method": {"name": method},
        "engine": {"workers": 1, "threads": 1},
    }
    return assemble(model, data, parse(table, "the benchmark"))


def pair(of: Experiment, model: nn.Module, data: Federation, tier: str) -> dict[str, Case]:
    """Return two cases: one task for each client in the engine, and a bare loop over all their batches."""
    train, method = of.config.train, of.method
    state = method.start(exchanged_tensors(model))
    tasks = list(method.tasks(state, [Participant(client, tier) for client in range(of.federation.size)], 1))

    def engine() -> None:
        for reply in of.engine.run(tasks):
            assert isinstance(reply, Update), reply

    network = channels_last(load(method.network(method.spec(tier)), method.weights(state, tier))).train()
    optimizer = torch.optim.SGD(network.parameters(), train.lr, train.momentum, weight_decay=train.weight_decay)
    feeds = [Feed(samples, data.preprocessing) for samples in data.clients]
    batches = [each for feed in feeds for each in feed.shuffled(train.batch, torch.Generator())]
    return {"engine": engine, "bare": lambda: bare(network, optimizer, batches)}


def bare(network: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(network(inputs), targets).backward()
        optimizer.step()


def local_training(quick: bool, repeats: int, samples: int, batch: int) -> dict[str, Ratio]:
    """Measure part 1: samples a second in the engine, as a share of the bare loop's."""
    width, clients, samples, batch = (0.125, 2, 20, 10) if quick else (1.0, CLIENTS, samples, batch)
    torch.manual_seed(0)
    resnet, one = resnet18(width=width), images(1, samples)
    plain = experiment(resnet, one, "fedhm", batch=batch, **PAPER)
    decayed = experiment(resnet, one, "fedhm", batch=batch, frobenius_decay=1e-4, **PAPER)
    small, cohort = cnn(), images(clients, SAMPLES)
    cases = {f"ResNet-18 {tier}": pair(plain, resnet, one, tier) for tier in TIERS}
    cases["ResNet-18 1/2, Frobenius decay"] = pair(decayed, resnet, one, "1/2")
    cases["CNN"] = pair(experiment(small, cohort, "fedavg", **PFL), small, cohort, "full")
    ratios, rows = {}, []
    for name, both in cases.items():
        times = interleaved(both, repeats)
        ratios[name] = ratio(times["engine"], times["bare"])
        count = clients * SAMPLES if name == "CNN" else samples
        rows.append((name, *(f"{count / median(times[case]):.0f}" for case in ("engine", "bare")), ratios[name]))
    show("Local training, one thread", ("network", "samples/s", "bare loop", "of bare (quartiles)"), rows)
    return ratios


def rounds(quick: bool, repeats: int, environment: Path) -> dict[str, Ratio]:
    """Measure part 2: whole rounds, each library in a process of its own that waits for its turn."""
    ours = [sys.executable, "-m", "peers.fedhm_rounds"]
    clients = "4" if quick else str(CLIENTS)
    executor = [sys.executable, "-m", "peers.executor_rounds", "2", clients]
    commands = {"fedhm, 2 workers": [*ours, "2", clients], "fedhm, 1 worker": [*ours, "1", clients]}
    commands["fedhm, ProcessPoolExecutor"] = executor  # its own pool replaced by that of the standard library
    python = str(environment.absolute() / "bin" / "python")
    if quick:
        pass
    elif not Path(python).exists():
        print(f"pfl-research and Flower are not in {environment}, so they are left out: make them with `make peers`.")
    else:
        torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        commands["pfl, 2 processes"] = [*torchrun, "-m", "peers.pfl_rounds", "1"]
        commands["pfl, 2 threads"] = [python, "-m", "peers.pfl_rounds", "2"]
        commands["pfl, 1 thread"] = [python, "-m", "peers.pfl_rounds", "1"]
        commands["Flower, 2 actors"] = [python, "-m", "peers.flower_rounds"]
    with ExitStack() as stack:
        peers = {name: stack.enter_context(Peer(command)) for name, command in commands.items()}
        times = interleaved({name: peer.round for name, peer in peers.items()}, repeats, warmup=1 if quick else 2)
    ratios = {name: ratio(times["fedhm, 2 workers"], seconds) for name, seconds in times.items()}
    rows = [(name, median(seconds), ratios[name]) for name, seconds in times.items()]
    title = f"Rounds of {clients} clients × {SAMPLES} samples, CNN"
    show(title, ("library", "seconds a round", "fedhm with 2 workers is … times as fast (quartiles)"), rows)
    return {name: each for name, each in ratios.items() if name != "fedhm, 2 workers"}


def main() -> None:
    options = arguments(
        __doc__,
        repeats=(7, "how often each case is measured"),
        samples=(128, "of the client that trains a ResNet"),
        batch=(64, "of the ResNets"),
        peers=(Path(".venv-peers"), "the environment with pfl-research and Flower"),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that peers are ended then too
    torch.set_num_threads(1)
    repeats = 1 if options.quick else options.repeats
    print(machine())
    training = local_training(options.quick, repeats, options.samples, options.batch)
    turns = rounds(options.quick, repeats, options.peers)
    save_json(options.json, {"quick": options.quick, "of_bare": training, "two_workers_against": turns})


if __name__ == "__main__":
    main()
