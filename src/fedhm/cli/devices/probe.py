"""One measurement of `fedhm profile` or `fedhm fit`, in a process of its own: steps of training one network in one way.

Reads a JSON object from standard input, and writes one to standard output. Other processes only make a step take
longer, never shorter: so several steps are timed together, several times, and the fastest counts.
"""

import ctypes
import gc
import json
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedhm.assembly import Design, make_client, named_design
from fedhm.cli.devices.fresh_process import STEPS, TIMES
from fedhm.config.loading import parse_resolved
from fedhm.config.schema import ResolvedConfig
from fedhm.data.samples import Preprocessing, Samples
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.plan import RankPlan
from fedhm.machine.device import find_device
from fedhm.machine.process import return_freed_memory
from fedhm.methods.tier_work import TierWork
from fedhm.networks.exchange import exchanged_tensors
from fedhm.networks.inputs import require_tensor
from fedhm.networks.reuse import NetworkPool
from fedhm.work.messages import Task


def measured(config: ResolvedConfig, which: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a step, and the most memory above that of the process before training; 0: unknown.

    which  network: the one of a tier's task, or the version of the model with these ranks
    """
    return_freed_memory()  # as a device does that has no memory to spare
    torch.set_num_threads(config.engine.threads)
    design = named_design(config)
    sample = require_tensor(design.sample, "this measurement")
    shape = tuple(sample.shape[1:])
    task = _version(design, **which) if "ranks" in which else _of_tier(design, config, shape, **which)

    def build(name: str) -> nn.Module:
        if "ranks" in which:
            return to_hybrid(design.model, RankPlan(which["ranks"], which["form"]), spectral=False)
        return design.method.network(name)

    networks = NetworkPool(build, find_device("cpu"), False)
    with torch.no_grad():
        outputs = design.model(sample.repeat(2, *([1] * len(shape)))).shape[-1]

    def train(samples: int) -> float:
        inputs = torch.randn(samples, *shape)
        labels = torch.arange(samples) % outputs if config.objective.has_labels else torch.randn(samples, outputs)
        client = make_client(Samples(inputs, labels), Preprocessing(), networks, config, None)
        started = time.perf_counter()
        client.run(task)
        return time.perf_counter() - started

    train(2)  # loads what torch loads when it is first needed
    before = _fresh_peak()
    seconds = min(train(STEPS * config.train.batch) for _ in range(TIMES)) / (STEPS * config.train.epochs)
    peak = _status("VmHWM")
    return {"seconds": seconds, "memory": max(0, peak - before) if before and peak else 0}


def _of_tier(design: Design, config: ResolvedConfig, shape: tuple[int, ...], tier: str, network: str) -> Task:
    """Return a tier's task, trained as the settings say and not as the tier, if it is a budget, says itself."""
    tasks = TierWork(design.method, design.model, config, shape).tasks(tier)
    task = next(task for task in tasks if task.network == network)
    own = ("micro_batch", "checkpointing")
    return replace(task, options={name: value for name, value in task.options.items() if name not in own})


def _version(design: Design, ranks: dict[str, int], form: Any) -> Task:
    network = to_hybrid(design.model, RankPlan(ranks, form))
    return Task("train", 1, 0, "version", "version", exchanged_tensors(network))


def _fresh_peak() -> int:
    """Forget the most memory that the process ever had, where the system can; return what it has now."""
    gc.collect()
    with suppress(OSError, AttributeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return _status("VmRSS")


def _status(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asked = json.load(sys.stdin)
    print(json.dumps(measured(parse_resolved(asked.pop("config"), "the config"), asked)))
