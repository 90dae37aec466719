"""What this machine can bear: the number of cores that this process may keep busy, and the memory."""

import math
import os
from pathlib import Path

MOST_PROCESSES = 1024  # of workers, or threads; OpenMP dies of many more


def memory() -> float:
    """Return how many bytes of memory the machine has, or its container may use; infinitely many if that is unknown."""
    try:
        whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not on Windows
        return math.inf
    limit = Path("/sys/fs/cgroup/memory.max")
    said = limit.read_text().strip() if limit.exists() else ""
    return min(whole, int(said)) if said.isdecimal() else whole


def usable_cores() -> int:
    """Return how many cores the system lets this process run on, or fewer if OMP_NUM_THREADS says so.

    That variable is how schedulers and people give a process its share of a machine, so worker processes count
    towards it as threads do. It is read here rather than from torch.get_num_threads(), which tells what the last
    piece of code in this process has set, and would make a run's settings depend on what ran before it.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    share = (
        os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    )  # a list has a number for each nesting level
    return min(allowed, int(share)) if share.isdecimal() and int(share) else allowed
