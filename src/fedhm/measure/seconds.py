"""How long a step of training takes on this machine, and the largest version that is quick enough."""

import statistics
import time
from dataclasses import replace

import torch
from torch import nn

from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.plan import RankPlan
from fedhm.measure.cost import optimizer_of, sample_of
from fedhm.measure.fit import Fit, fitted
from fedhm.measure.versions import Mode, Training, Versions
from fedhm.networks.checkpointing import checkpoint_blocks
from fedhm.networks.inputs import one_tensor

STEPS = 3  # of which the median counts, after one that does not
TRIES = 5  # times are noise: as often a smaller version is tried


def seconds_of_step(network: nn.Module, training: Training, mode: Mode) -> float:
    """Measure the seconds of a step here, with as many threads as torch has; the network is changed by it."""
    checkpoint_blocks([network], mode.checkpointing)
    network = network.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    inputs = one_tensor(sample_of(network, training.batch, training.shape, training.dtype), "a budget")
    stepping = optimizer_of(training.optimizer, network.parameters())
    taken: list[float] = []
    for _ in range(1 + STEPS):
        started = time.perf_counter()
        stepping.zero_grad()
        for part in inputs.split(mode.micro_batch or training.batch):
            network(part).logsumexp(-1).sum().backward()
        stepping.step()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def timed(versions: Versions, found: Fit, most: float | None = None) -> Fit:
    """Return a version with the seconds of its step; with `most`, the largest below it that does not take longer."""
    measured = _seconds(versions, found.plan, found.mode)
    for _ in range(TRIES if most is not None and found.number else 0):
        assert most is not None
        if measured <= most:
            break
        number = int(found.number * min(0.9, 0.95 * most / measured))
        found = fitted(versions, versions.plan(number), found.mode, number)
        measured = _seconds(versions, found.plan, found.mode)
    if most is not None and measured > most:
        raise FedhmError(
            f"seconds = {most:g} is too little for a step of training here: the closest version with {found.mode}, of "
            f"{found.expected.parameters:,} parameters, takes {measured:.3g} s: give at least so much, or a smaller "
            "train.batch"
        )
    return replace(found, expected=replace(found.expected, seconds=measured))


def _seconds(versions: Versions, plan: RankPlan, mode: Mode) -> float:
    return seconds_of_step(to_hybrid(versions.model, plan), versions.training, mode)
