"""Measurements of training in fresh processes, in which nothing was trained before."""

import json
import signal
import subprocess
import sys
from typing import Any

from fedhm.config.schema import ResolvedConfig, TrainConfig
from fedhm.errors import FedhmError
from fedhm.measure.fit import TrainingMode

STEPS, TIMES = 4, 3  # so many steps are timed together, so many times


def mode_of(train: TrainConfig) -> TrainingMode:
    return TrainingMode(train.parts, bool(train.checkpointing))


def with_mode(config: ResolvedConfig, mode: TrainingMode) -> ResolvedConfig:
    """Return the settings for one epoch in this mode."""
    how = {"epochs": 1, "micro_batch": mode.micro_batch}
    if bool(config.train.checkpointing) != mode.checkpointing:
        how["checkpointing"] = mode.checkpointing
    return config.model_copy(update={"train": config.train.model_copy(update=how)})


def step_in_fresh_process(config: ResolvedConfig, what: str, **which: Any) -> dict[str, float] | None:
    """Measure the seconds and the memory of a step; None if there is not enough memory for it.

    what   is trained, for who reads what is wrong
    which  network, for `fedhm.cli.devices.probe`
    """
    asked = json.dumps({"config": config.to_toml(), **which})
    command = [sys.executable, "-m", "fedhm.cli.devices.probe"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if ran_out_of_memory(done.returncode, done.stderr):
        return None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode} and said nothing"])[-1]
        raise FedhmError(f"training {what} fails on this device: {last}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def ran_out_of_memory(code: int, said: str) -> bool:
    """Tell whether a process ended for want of memory: the system kills it, or has refused what torch asked for."""
    refused = any(words in said for words in ("MemoryError", "can't allocate memory"))
    return code == -signal.SIGKILL or (code != 0 and refused)
