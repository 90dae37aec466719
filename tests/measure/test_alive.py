"""What is counted of a process's memory, and that the process really takes as much."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.nn.functional as F

from fedhm.measure.cost import FORWARD, OF_INPUTS, OF_WEIGHTS, AliveBytes

ROOT = Path(__file__).parent.parent.parent
LARGE, SMALL = 2**18, 2**10  # floats: 1 MiB, which goes back to the system, and 4 KiB, which do not


def test_small_blocks_that_were_freed_stay_in_the_heap() -> None:
    watch = AliveBytes()
    with watch:
        held = [torch.ones(LARGE)]
        held.clear()
        held.append(torch.ones(SMALL))
        held.clear()
        held.append(torch.ones(LARGE))
        assert watch.alive == 4 * LARGE
        assert watch.peak == 4 * (LARGE + SMALL)
        held.append(torch.ones(SMALL))  # takes the place of the other
        assert watch.peak == 4 * (LARGE + SMALL)


def test_every_different_convolution_keeps_its_code() -> None:
    watch = AliveBytes()
    weight = torch.ones(4, 3, 3, 3, requires_grad=True)
    images = [torch.ones(2, 3, size, size, requires_grad=True) for size in (8, 8, 6)]
    with watch:
        outputs = [F.conv2d(x, weight) for x in images]
        assert watch.kept == 2 * FORWARD
        outputs[0].sum().backward()
        outputs[1].sum().backward()
        assert watch.kept == 2 * FORWARD + OF_INPUTS + OF_WEIGHTS
        F.conv2d(images[0].detach(), weight).sum().backward()  # whose gradient is that of the weight alone
        assert watch.kept == 2 * FORWARD + OF_INPUTS + 2 * OF_WEIGHTS


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="elsewhere freed memory is not given back at once")
@pytest.mark.parametrize("case", [{"tier": "1/8", "checkpointing": True}, {"tier": "full", "micro_batch": 16}])
def test_a_process_takes_as_much_as_predicted(case: dict[str, object]) -> None:
    """Up to a tenth, of a ResNet-18 of a quarter of the width; `docs/measurements.md` has the whole one."""
    command = [sys.executable, "benchmarks/memory.py", "--quick", "--batch", "64", "--case", json.dumps(case)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    found = []
    for _ in range(3):  # what a process takes differs by some percent from one to the next
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    assert found[0]["predicted"] == pytest.approx(median(each["measured"] for each in found), rel=0.1)
