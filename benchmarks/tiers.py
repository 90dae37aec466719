"""How much of a tier's saving in MACs arrives as time and memory of a training step, and which layers eat the rest.

One thread, channels-last, as a client trains. Memory is counted twice: bytes of tensors alive at once
(`fedhm.measure.cost.training_memory`), and the peak resident memory of a process that trains, less that of an idle one.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm import plan_ranks, to_hybrid
from fedhm.measure.cost import training_memory
from fedhm.models import MODELS
from fedhm.networks.structure import channels_last
from layer_times import LayerTimes, layer_macs, layers, part_of
from measure import arguments, interleaved, machine, median, peak_memory, ratio, save_json, show
from tiers_plot import plot

TIERS = ("full", "1/2", "1/4", "1/8")
SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Training:
    network: nn.Module
    optimizer: torch.optim.Optimizer
    x: Tensor
    y: Tensor

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.network(self.x), self.y).backward()
        self.optimizer.step()


def network_of(model: nn.Module, tier: str) -> nn.Module:
    plan = plan_ranks(model, 1 if tier == "full" else tier)
    network = to_hybrid(model, plan, spectral=False)
    for parameter in network.parameters():
        if parameter.ndim == 4:  # zeros would be multiplied as fast, but no network trains on them
            nn.init.kaiming_normal_(parameter)
    return channels_last(network)


def training_of(model: nn.Module, tier: str, batch: int) -> Training:
    network = network_of(model, tier)
    x = torch.randn(batch, *SHAPE).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    return Training(network, optimizer, x, torch.randint(10, (batch,)))


def two_steps(model: nn.Module, tier: str, batch: int) -> None:
    training = training_of(model, tier, batch)
    for _ in range(2):  # momentum exists from the second step on
        training.step()


def resident(model: nn.Module, batch: int) -> dict[str, float]:
    """Return the resident memory of training in MiB by tier, beyond that of an idle process."""
    idle = peak_memory(lambda: None)
    return {tier: peak_memory(partial(two_steps, model, tier, batch)) - idle for tier in TIERS}


def by_layer(trainings: Mapping[str, Training], repeats: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of every layer by tier, measured in turns."""
    timers = {tier: LayerTimes(training.network) for tier, training in trainings.items()}
    steps: dict[str, list[dict[str, float]]] = {tier: [] for tier in trainings}
    for _ in range(1 + repeats):
        for tier, training in trainings.items():
            steps[tier].append(timers[tier].step(training.network, training.optimizer, training.x, training.y))
    for timer in timers.values():
        timer.remove()
    return {
        tier: {name: median(step[name] for step in taken[1:]) for name in taken[0]} for tier, taken in steps.items()
    }


def by_part(network: nn.Module, of_layers: Mapping[str, float]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    known = layers(network)
    for name, value in of_layers.items():
        sums[part_of(name, known.get(name))] += value
    return dict(sums)


def main() -> None:
    asked = arguments(
        __doc__,
        model=("resnet18", "resnet18 or resnet34"),
        batch=(64, "samples of a batch"),
        width=(1.0, "of the model"),
        repeats=(7, "turns that are timed"),
        plot=("", "draw the figure into this file"),
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, batch, repeats = (0.125, 4, 2) if asked.quick else (asked.width, asked.batch, asked.repeats)
    model = MODELS[asked.model](num_classes=10, width=width)
    rss = resident(model, batch)
    tensors = {tier: training_memory(network_of(model, tier), SHAPE, batch) / 2**20 for tier in TIERS}
    trainings = {tier: training_of(model, tier, batch) for tier in TIERS}
    times = interleaved({tier: training.step for tier, training in trainings.items()}, repeats)
    of_layers = by_layer(trainings, repeats)
    networks = {tier: training.network for tier, training in trainings.items()}
    seconds = {tier: by_part(network, of_layers[tier]) for tier, network in networks.items()}
    macs = {tier: by_part(network, layer_macs(network, SHAPE)) for tier, network in networks.items()}
    rows = summary(times, macs, tensors, rss)
    print(f"{asked.model}, width {width:g}, batch {batch}, 32×32; {machine()}")
    show("A training step by tier", [*rows["full"]], [[*row.values()] for row in rows.values()])
    show_parts(seconds, macs)
    if asked.plot:
        plot(asked.plot, asked.model, rows, seconds)
    save_json(asked.json, {"tiers": rows, "seconds": seconds, "macs": macs, "layers": of_layers})


def summary(
    times: Mapping[str, list[float]],
    macs: Mapping[str, Mapping[str, float]],
    tensors: Mapping[str, float],
    rss: Mapping[str, float],
) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for tier in TIERS:
        time = ratio(times["full"], times[tier])
        share = sum(macs[tier].values()) / sum(macs["full"].values())
        rows[tier] = {
            "tier": tier,
            "MACs": round(share, 3),
            "time": time,
            "saving that arrives": "" if tier == "full" else f"{(1 - time.median) / (1 - share):.0%}",
            "ms": round(1e3 * median(times[tier])),
            "tensors": round(tensors[tier] / tensors["full"], 2),
            "MiB": round(tensors[tier]),
            "resident": round(rss[tier] / rss["full"], 2),
            "MiB resident": round(rss[tier]),
        }
    return rows


def show_parts(seconds: Mapping[str, Mapping[str, float]], macs: Mapping[str, Mapping[str, float]]) -> None:
    """Print each part's time and, in brackets, what is beyond full time × share of MACs: all if it has none."""
    rows = []
    for part, full in seconds["full"].items():
        row: list[object] = [part, f"{macs['full'].get(part, 0) / 1e6:.1f}", f"{1e3 * full:.0f}"]
        for tier in TIERS[1:]:
            share = macs[tier].get(part, 0) / (macs["full"].get(part, 0) or 1)
            row.append(f"{share:.2f}" if share else "–")
            row.append(f"{1e3 * seconds[tier][part]:.0f} ({1e3 * (seconds[tier][part] - share * full):+.0f})")
        rows.append(row)
    columns = ["part", "M MACs", "ms"]
    for tier in TIERS[1:]:
        columns += [f"{tier}: MACs", f"{tier}: ms"]
    show("Where the time goes, and in brackets what is beyond the share of MACs", columns, rows)


if __name__ == "__main__":
    main()
