"""Independent pieces of work of one process, on as many cores as torch has threads.

The small decompositions of which a server's round is made gain little by threads that share one of them, and nearly
all by threads that have one each. Each piece is computed by one thread, so results do not depend on how many there are.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of `work` in the order of the items."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if min(threads, len(items)) < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)
