"""The device on which networks run, torch's generators, and work on several threads."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from fedhm.errors import FedhmError

CPU = torch.device("cpu")


def find_device(name: str) -> torch.device:
    """Return the device of this name, or raise if it cannot be used. `auto` is a CUDA device if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros((), device=device).item()
    except Exception as error:  # torch has no error of its own for this
        reason = str(error).partition("\n")[0] or repr(error)
        raise FedhmError(f"engine.device = '{name}' cannot be used with this PyTorch: {reason}") from None
    return device


@contextmanager
def seeded(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Seed torch's global generators, and restore them afterwards. Dropout and similar layers use no others.

    `torch.manual_seed` seeds every kind of device, which takes longer than a training step of a small network.
    """
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
        yield


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set torch's number of threads, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def set_threads(number: int) -> None:
    """Let torch use this number of threads from now on, for processes that fedhm started itself."""
    torch.set_num_threads(number)


Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return `work` of all items, in their order, computed on as many cores as torch has threads.

    The small decompositions of a server's round gain little from threads that share one decomposition, and much from
    threads that have one each. One thread computes each item, so results do not depend on the number of threads.
    """
    available = torch.get_num_threads()
    with threads(1):
        if min(available, len(items)) < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(available, initializer=set_threads, initargs=(1,)) as pool:
            return list(pool.map(work, items))
