"""Giving freed memory back to the system at once, so that a process takes what its tensors take.

By default glibc raises the size from which memory is mapped on its own, and given back when it is freed, up to 32 MB
once such a block was freed. Activations then lie in a heap between others, whose holes stay in memory: twice of what is
alive. Fixed, the size costs a few percent of the time, for pages that are mapped again.
"""

import ctypes
import platform

M_MMAP_THRESHOLD = -3  # of malloc.h
SMALLEST = 2**18  # bytes: what is smaller stays in the heap


def give_back_at_once() -> bool:
    """Have this process, and those forked from it, give back freed memory; return whether that can be done here."""
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, SMALLEST))
