"""How much memory a step of training takes above an idle process, predicted and measured, by tier and training mode.

Every case is a fresh process with one thread: it trains a tiny network first, so that the libraries are loaded, and
then makes two steps, after which the system says how much memory was resident at most; what was read of libraries
meanwhile is not counted. "As glibc has it" is the same without giving freed memory back at once
(`fedhm/machine/process.py`). Seconds are those of the processor, of the second step.
`--case '{"tier": "1/8", "checkpointing": true}'` is one case alone.
The last row is the version that `fedhm fit` chooses for 128 MB and as many bytes as the tier 1/8.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fedhm
from fedhm.config.schema import TrainConfig
from fedhm.lowrank.hybrid import plan_of
from fedhm.machine.process import return_freed_memory
from fedhm.measure.cost import configured_training_memory
from fedhm.networks.saving import backward_in_parts
from fedhm.networks.structure import channels_last
from fedhm.work.train import local_optimizer, prepare
from measure import Ratio, arguments, machine, save_json, show

SHAPE = (3, 32, 32)
TIERS = ("full", "1/2", "1/4", "1/8")
BUDGET = "128MB"


@dataclass(frozen=True)
class Case:
    tier: str
    micro_batch: int = 0
    checkpointing: bool = False
    given_back: bool = True

    @property
    def mode(self) -> str:
        parts = ["checkpointing"] if self.checkpointing else []
        parts += [f"micro-batches of {self.micro_batch}"] if self.micro_batch else []
        return ", ".join(parts or ["plain"]) + ("" if self.given_back else ", as glibc has it")


@cache
def plan_for(tier: str, width: float, batch: int) -> tuple[fedhm.RankPlan, int, bool]:
    """Return a tier's plan, and of the budget how to train."""
    torch.manual_seed(0)
    model = fedhm.models.resnet18(width=width)
    if tier != BUDGET:
        return fedhm.plan_ranks(model, 1 if tier == "full" else tier), 0, False
    small = fedhm.to_hybrid(model, fedhm.plan_ranks(model, "1/8"), spectral=False)
    found = fedhm.fit(model, SHAPE, batch, memory=BUDGET, bytes=fedhm.measure(small, SHAPE).bytes)
    return found.plan, found.micro_batch, found.checkpointing


def network_of(case: Case, width: float, batch: int) -> tuple[nn.Module, Case]:
    plan, micro_batch, checkpointing = plan_for(case.tier, width, batch)
    case = Case(case.tier, micro_batch, checkpointing) if case.tier == BUDGET else case
    torch.manual_seed(0)
    model = fedhm.models.resnet18(width=width)
    network = fedhm.to_hybrid(model, plan, spectral=False)
    for parameter in network.parameters():
        if parameter.ndim == 4:
            nn.init.kaiming_normal_(parameter)
    return channels_last(network), case


def train_steps(network: nn.Module, train: TrainConfig) -> float:
    """Make two steps as a client does, and return the seconds of the second."""
    optimizer = local_optimizer(network, train, 1e-3)
    prepare(network, train)
    trained = list(network.parameters())
    x = torch.randn(train.batch, *SHAPE).contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (train.batch,))
    taken = 0.0
    for _ in range(2):
        started = time.process_time()
        optimizer.zero_grad()
        backward_in_parts(lambda a, b: F.cross_entropy(network(a), b), x, y, train.micro_batch, trained)
        optimizer.step()
        taken = time.process_time() - started
    return taken


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def settle() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # from here on the peak counts anew


def measure_case(case: Case, width: float, batch: int) -> dict[str, object]:
    """Measure in this process, which is to be a new one."""
    torch.set_num_threads(1)
    if case.given_back:
        return_freed_memory()
    tiny = TrainConfig(batch=2, checkpointing=case.given_back)  # which gives back, too
    warm, _ = network_of(Case("1/8" if case.tier == BUDGET else case.tier), 0.125, 2)
    train_steps(warm, tiny)
    del warm
    plan_for(case.tier, width, batch)  # what planning leaves behind is no part of training
    settle()
    idle, files = resident("VmRSS"), resident("RssFile")
    network, case = network_of(case, width, batch)
    fresh = fedhm.models.resnet18(width=width).to("meta")
    settle()
    train = TrainConfig(batch=batch, micro_batch=case.micro_batch, checkpointing=case.checkpointing)
    seconds = train_steps(network, train)
    read = resident("RssFile") - files  # pages of libraries that nobody had needed before: they can be read again
    peak = resident("VmHWM") - idle - read
    predicted = configured_training_memory(fedhm.to_hybrid(fresh, plan_of(network), spectral=False), SHAPE, train)
    return {"tier": case.tier, "mode": case.mode, "predicted": predicted, "measured": peak, "seconds": seconds}


def main() -> None:
    options = arguments(__doc__, batch=(64, "samples in a batch"), case=("", "one case, in this very process: JSON"))
    if options.case:
        print(json.dumps(measure_case(Case(**json.loads(options.case)), 0.25 if options.quick else 1.0, options.batch)))
        return
    parts = options.batch // 4
    cases = [Case(t, *how) for t in TIERS for how in ((0, False), (0, True), (parts, False), (parts, True))]
    cases = [Case("full", given_back=False), *cases, Case(BUDGET)]
    if options.quick:
        cases = [Case("full", given_back=False), Case("full"), Case("1/8", 4, True)]
    rows = [in_a_new_process(case, options) for case in cases]
    columns = ["tier", "mode", "predicted MB", "measured MB", "predicted / measured", "seconds"]
    lines = [
        [r["tier"], r["mode"], f"{r['predicted'] / 1e6:.1f}", f"{r['measured'] / 1e6:.1f}",
         f"{r['predicted'] / r['measured']:.2f}", f"{r['seconds']:.2f}"]
        for r in rows
    ]  # fmt: skip
    show(f"memory of a training step, batch {options.batch}; {machine()}", columns, lines)
    ratios = {f"{r['tier']}, {r['mode']}": Ratio(*[r["predicted"] / r["measured"]] * 3) for r in rows}
    save_json(options.json, {"predicted_of_measured": ratios})


def in_a_new_process(case: Case, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--batch", str(options.batch)]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *["--quick"] * options.quick], env=environment, check=True, capture_output=True)
    print(done.stdout.decode().strip(), file=sys.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
