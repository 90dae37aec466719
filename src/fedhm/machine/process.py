"""This process and its machine: memory and cores, how freed memory is handled, and how the process ends."""

import atexit
import ctypes
import math
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

MOST_PROCESSES = 1024  # of workers, or threads; OpenMP fails with many more
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
MMAP_THRESHOLD = 2**18  # bytes: smaller blocks stay in the heap when they are freed
LARGEST_THRESHOLD = 32 << 20  # bytes: the largest that glibc takes


def memory_limit() -> float:
    """Return the bytes of memory of the machine, or of its container; infinity if they are unknown."""
    try:
        whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not on Windows
        return math.inf
    limit = Path("/sys/fs/cgroup/memory.max")
    content = limit.read_text(encoding="utf-8").strip() if limit.exists() else ""
    return min(whole, int(content)) if content.isdecimal() else whole


def utf8_output() -> dict[str, str]:
    """Return the environment for a Python process whose output is read here: it prints UTF-8, whatever the terminal."""
    return {**os.environ, "PYTHONIOENCODING": "utf-8:backslashreplace"}


def usable_cores() -> int:
    """Return the number of cores that the system gives this process, or fewer if OMP_NUM_THREADS is smaller.

    Schedulers and people use that variable to give a process its share of a machine. So worker processes count towards
    it as threads do. It is read here rather than from torch.get_num_threads(): any code in this process may have
    changed that number, and a run's settings would depend on what ran before it.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    share = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list has a number per nesting level
    return min(allowed, int(share)) if share.isdecimal() and int(share) else allowed


# glibc's allocator. Three functions, for three wishes: little memory, fast workers, a fast process of the user's.


def return_freed_memory() -> bool:
    """Make this process, and its forks, return freed memory to the system at once; tell whether that works here.

    A process then takes as much memory as its tensors. By default glibc raises the size from which a block is mapped
    on its own, up to 32 MB, once a block of that size was freed. Activations then lie in a heap between other blocks,
    whose holes stay in memory: twice the size of the living tensors. A fixed size costs a few percent of the time,
    since pages are mapped again.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD))


def keep_freed_memory() -> None:
    """Make a worker process keep the memory that a training step frees, for the next step.

    By default glibc returns much of it to the system each time. A step then spends a tenth of its time or more on
    getting it back page by page.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGEST_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def raise_mmap_threshold() -> None:
    """Let glibc learn to keep the memory that a small network's step frees, without changing a setting.

    This is for the process of the user, who may have settings of their own. glibc keeps larger blocks once it has seen
    a large block freed. No page of this block is touched.
    """
    import torch  # here, since the command line imports this module before it needs torch

    with suppress(RuntimeError, MemoryError):  # there may be less memory than that, and it may be enough
        torch.empty(LARGEST_THRESHOLD - (1 << 20), dtype=torch.uint8)  # glibc learns nothing from blocks beyond 32 MB


def in_child(compute: Callable[[], int]) -> int:
    """Return a number that a forked process computes. What it begins to use, such as a device, ends with it."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):  # no answer is an answer, too
            os.write(into, str(compute()).encode())
        os._exit(0)
    os.close(into)
    try:
        with os.fdopen(out, "rb") as answer:
            found = answer.read()
    except BaseException:  # Ctrl-C
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.waitpid(pid, 0)
    return int(found) if found else 0


def run_and_exit(run: Callable[[], object]) -> NoReturn:
    """Run the rest of this process, and end it with the exit code of `sys.exit(run())`, but sooner.

    Python frees every object of every module at its end. With torch imported that takes half a second of the processor,
    and a whole one in a fork, which has to copy the memory first. Threads and exit functions are waited for as usual.
    """
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
