"""One measurement of `fedhm profile`, in a process of its own: steps of training one network in one way.

Reads a JSON object from standard input, and writes one to standard output.
"""

import ctypes
import gc
import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from fedhm.assembly import make_client, named_design
from fedhm.config.reading import parse_resolved
from fedhm.config.settings import ResolvedConfig
from fedhm.data.batches import Preprocessing
from fedhm.data.samples import Samples
from fedhm.machine.device import find_device
from fedhm.methods.tier_work import TierWork
from fedhm.networks.inputs import one_tensor
from fedhm.work.reuse import Networks

STEPS = 4  # that are timed together, twice: the faster time counts


def measured(config: ResolvedConfig, tier: str, network: str) -> dict[str, float]:
    """Return the seconds of a step, and the most memory above that of the process before training; 0: unknown."""
    torch.set_num_threads(config.engine.threads)
    design = named_design(config)
    sample = one_tensor(design.sample, "fedhm profile")
    shape = tuple(sample.shape[1:])
    task = next(t for t in TierWork(design.method, design.model, config, shape).tasks(tier) if t.network == network)
    networks = Networks(design.method.network, find_device("cpu"), False)

    def train(samples: int) -> float:
        outputs = design.method.network(tier)(sample.repeat(2, *([1] * len(shape)))).shape[-1]
        inputs = torch.randn(samples, *shape)
        labels = torch.arange(samples) % outputs if config.objective.has_labels else torch.randn(samples, outputs)
        client = make_client(Samples(inputs, labels), Preprocessing(), networks, config, None)
        started = time.perf_counter()
        client.run(task)
        return time.perf_counter() - started

    train(2)  # loads what torch loads when it is first needed
    before = _fresh_peak()
    seconds = min(train(STEPS * config.train.batch) for _ in range(2)) / (STEPS * config.train.epochs)
    peak = _status("VmHWM")
    return {"seconds": seconds, "memory": max(0, peak - before) if before and peak else 0}


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
    asked = json.load(sys.stdin)
    print(json.dumps(measured(parse_resolved(asked["config"], "the config"), asked["tier"], asked["network"])))
