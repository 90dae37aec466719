"""Training graphs of the library's models at every tier: gradients against PyTorch, file size, seconds of a step.

    python benchmarks/on_device.py cnn mlp resnet10 resnet18 resnet34 --width 0.25 --batch 16

A step is one batch forward and backward on one thread, the median in processor time, the two runtimes in turn.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from fedhm.config.registry import make
from fedhm.config.schema import TrainConfig
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.plan import plan_ranks
from fedhm.models import MODELS
from fedhm.ondevice.check import check_graph
from fedhm.ondevice.graph import Example, build_graph
from fedhm.ondevice.loop import GraphLoop

TIERS = ("full", "1/2", "1/4", "1/8")
STEPS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=["cnn", "mlp", "resnet10", "resnet18", "resnet34"])
    parser.add_argument("--tiers", nargs="+", default=TIERS)
    parser.add_argument("--width", type=float, default=0.25)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pixels", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | tier | parameters | file | gradients within | step | PyTorch's step |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for name in options.models:
        for tier in options.tiers:
            print(row(name, tier, options.width, options.batch, options.pixels), flush=True)


def row(name: str, tier: str, width: float, batch: int, pixels: int) -> str:
    torch.manual_seed(0)
    shape = (32,) if name == "mlp" else (1 if name == "cnn" else 3, pixels, pixels)
    network = MODELS[name](num_classes=10, in_channels=shape[0], width=width)
    if tier != "full":
        network = to_hybrid(network, plan_ranks(network, tier))
    objective, train = make("objectives", "classification"), TrainConfig(batch=batch, nested=0.0)
    example = Example(torch.randn(64, *shape), torch.arange(64) % 10, 10)
    graph = build_graph(network, objective, train, example)
    check = check_graph(network, objective, train, graph, example)
    loop, held = GraphLoop(graph), torch.ones(10)
    inputs, targets = example.inputs[: batch + 1], example.targets[: batch + 1]
    steps: list[Callable[[], object]] = [
        lambda: loop.gradients(inputs, targets, held),
        lambda: torch_step(network, inputs, targets),
    ]
    loop.load({name: tensor.detach() for name, tensor in network.state_dict().items()})
    spent: list[list[float]] = [[], []]
    for _ in range(STEPS):
        for step, times in zip(steps, spent, strict=True):
            began = time.process_time()
            step()
            times.append(time.process_time() - began)
    seconds = [1e3 * statistics.median(times) for times in spent]
    parameters = sum(p.numel() for p in network.parameters())
    return (
        f"| {name} | {tier} | {parameters:,} | {len(graph.program) / 1e3:.0f} kB | {check.gradients:.0e} | "
        f"{seconds[0]:.1f} ms | {seconds[1]:.1f} ms |"
    )


def torch_step(network: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    network.train().zero_grad()
    nn.functional.cross_entropy(network(inputs), targets).backward()


if __name__ == "__main__":
    main()
