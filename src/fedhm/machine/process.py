"""What this machine can bear: the number of cores that this process may keep busy, and the memory."""

import atexit
import ctypes
import math
import os
import platform
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

MOST_PROCESSES = 1024  # of workers, or threads; OpenMP dies of many more


def memory_limit() -> float:
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


# Giving freed memory back to the system at once, so that a process takes what its tensors take.
#
# By default glibc raises the size from which memory is mapped on its own, and given back when it is freed, up to 32
# MB once such a block was freed. Activations then lie in a heap between others, whose holes stay in memory: twice of
# what is alive. Fixed, the size costs a few percent of the time, for pages that are mapped again.

M_MMAP_THRESHOLD = -3  # of malloc.h
MMAP_THRESHOLD = 2**18  # bytes: what is smaller stays in the heap


def return_freed_memory() -> bool:
    """Have this process, and those forked from it, give back freed memory; return whether that can be done here."""
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD))


# Ending a process without taking apart all that it has imported.
#
# Python frees every object of every module first. With torch imported that takes half a second of the processor, and
# a whole one in a fork, which has to copy the memory before. What is registered to be done at the end is done, as
# ever.


def run_and_exit(run: Callable[[], object]) -> NoReturn:
    """Run the rest of this process, and end it with the exit code that `sys.exit(run())` would give."""
    try:
        code = run()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int):
        if code is not None:
            print(code, file=sys.stderr)
        code = int(code is not None)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # nobody reads it any more; it is closed; there is none
            stream.flush()
    os._exit(code & 0xFF)
