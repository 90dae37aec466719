"""A few training steps, measured in a fresh process: for `fedhm profile` and `fedhm fit`.

A process that has trained before would hide the peak of memory. So `measure_step` starts `python -m fedhm.cli.probe`,
which reads a JSON object from standard input and writes one to standard output.
"""

import ctypes
import gc
import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedhm.assembly import Design, make_client, named_design
from fedhm.config.loading import parse_resolved
from fedhm.config.schema import ResolvedConfig, TrainConfig
from fedhm.data.samples import Preprocessing, Samples
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.plan import RankPlan
from fedhm.machine.device import find_device, set_threads
from fedhm.machine.memory import mentions_lack_of_memory
from fedhm.machine.process import return_freed_memory, utf8_output
from fedhm.measure.fit import TrainingMode
from fedhm.networks.exchange import exchanged_tensors
from fedhm.networks.inputs import require_tensor
from fedhm.networks.reuse import NetworkPool
from fedhm.networks.spec import NetworkSpec
from fedhm.server.filters.fleet import TierWork
from fedhm.work.messages import Task
from fedhm.work.work import steps_in_round

# Other processes make a step slower, never faster: so STEPS steps are timed together, TIMES times, and the fastest
# counts.
STEPS, TIMES = 4, 3


def mode_of(train: TrainConfig) -> TrainingMode:
    return TrainingMode(train.parts, bool(train.checkpointing))


def with_mode(config: ResolvedConfig, mode: TrainingMode) -> ResolvedConfig:
    """Return the settings for one epoch in this mode."""
    how = {"epochs": 1, "iterations": 0, "micro_batch": mode.micro_batch}
    if bool(config.train.checkpointing) != mode.checkpointing:
        how["checkpointing"] = mode.checkpointing
    return config.model_copy(update={"train": config.train.model_copy(update=how)})


def measure_step(config: ResolvedConfig, what: str, **network: Any) -> dict[str, float] | None:
    """Return the seconds and the peak memory of a step in a fresh process; None if there is not enough memory.

    what     the network in words, for error messages
    network  `tier` and `network` of a task, or `ranks` and `form` of a version of the model
    """
    request = json.dumps({"config": config.to_toml(), **network})
    command = [sys.executable, "-m", "fedhm.cli.probe"]
    done = subprocess.run(
        command, input=request, capture_output=True, env=utf8_output(), encoding="utf-8", errors="replace", check=False
    )
    if ran_out_of_memory(done.returncode, done.stderr):
        return None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode} and said nothing"])[-1]
        raise FedhmError(f"training {what} fails on this device: {last}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def ran_out_of_memory(code: int, stderr: str) -> bool:
    """Tell whether a process ended for lack of memory: the system killed it, or refused an allocation of torch."""
    return code == -signal.SIGKILL or (code != 0 and mentions_lack_of_memory(stderr))


def measure_here(config: ResolvedConfig, network: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a step, and the peak memory above that of the process before training; 0: unknown."""
    return_freed_memory()  # as on a device without memory to spare
    set_threads(config.engine.threads)
    design = named_design(config)
    sample = require_tensor(design.sample, "this measurement")
    shape = tuple(sample.shape[1:])
    task = _version_task(design, **network) if "ranks" in network else _tier_task(design, config, shape, **network)

    def build(spec: NetworkSpec) -> nn.Module:
        if "ranks" in network:
            return to_hybrid(design.model, RankPlan(network["ranks"], network["form"]), spectral=False)
        return design.method.network(spec)

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

    train(2)  # torch loads libraries at their first use
    before = _reset_peak()
    samples = STEPS * config.train.batch
    seconds = min(train(samples) for _ in range(TIMES)) / steps_in_round(config.train, samples)
    peak = _status("VmHWM")
    return {"seconds": seconds, "memory": max(0, peak - before) if before and peak else 0}


def _tier_task(design: Design, config: ResolvedConfig, shape: tuple[int, ...], tier: str, network: str) -> Task:
    """Return a tier's task in the training mode of the settings; a tier with a budget has a mode of its own."""
    tasks = TierWork(design.method, design.model, config, shape).tasks(tier)
    task = next(task for task in tasks if str(task.network) == network)
    return replace(task, options=replace(task.options, micro_batch=None, checkpointing=None))


def _version_task(design: Design, ranks: dict[str, int], form: Any) -> Task:
    network = to_hybrid(design.model, RankPlan(ranks, form))
    return Task("train", 1, 0, "version", NetworkSpec("version"), exchanged_tensors(network))


def _reset_peak() -> int:
    """Reset the peak memory of the process, where the system can; return the memory in use now, or 0."""
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return 0
    return _status("VmRSS")


def _status(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request = json.load(sys.stdin)
    print(json.dumps(measure_here(parse_resolved(request.pop("config"), "the config"), request)))
