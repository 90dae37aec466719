"""Memory that is freed goes back to the system at once."""

import platform
import subprocess
import sys

import pytest

RESIDENT = """
from pathlib import Path
import sys
import torch
from fedhm.machine.process import return_freed_memory

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024  # MiB

if sys.argv[1] == "True":
    assert return_freed_memory()
large = torch.ones(7 << 20)  # once this is freed, glibc keeps blocks up to its size
del large
before = resident()
blocks = [torch.ones(1 << 18) for _ in range(100)]  # of 1 MiB
kept = blocks[1::2]
del blocks
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
@pytest.mark.parametrize("given_back", [True, False])
def test_holes_between_what_is_alive_are_given_back(given_back: bool) -> None:
    """Half of the blocks are freed, each between two that are not."""
    command = [sys.executable, "-c", RESIDENT, str(given_back)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 45 <= grown <= 60 if given_back else grown >= 90, "glibc alone would need no help"
