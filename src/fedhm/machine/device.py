"""The devices on which networks run, copies to and from them, torch's generators, and work on several threads."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedhm.errors import FedhmError

CPU = torch.device("cpu")
AUTO_KINDS = ("cuda", "mps", "xpu")  # that `auto` chooses; ROCm's devices are called cuda, too
PINNED_KINDS = ("cuda", "xpu")  # whose copies run beside the host's work if they come from pinned memory
UNKNOWN_MEMORY = 2 << 30  # bytes that a device is taken to have free if it does not tell


def find_device(name: str) -> torch.device:
    """Return the device of this name, or raise if it cannot be used. `auto` is an accelerator if there is one."""
    # asks the driver's library, so that this process may still be forked; torch looks at it at the first use of CUDA
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return found if found is not None and found.type in AUTO_KINDS else CPU
    try:
        device = torch.device(name)
        if device.type == "cpu":
            return CPU  # whatever its number: there is one
        if device.type == "cuda":  # anything more would begin CUDA in this process, which could not be forked then
            if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
                raise ValueError("there is no such CUDA device")
        else:
            torch.zeros((), device=device).item()
    except NotImplementedError:  # torch names every kind of device that it has code for
        reason = f"it was built without code for {device.type}"
    except Exception as error:  # torch has no error of its own for this
        reason = str(error).partition("\n")[0] or repr(error)
    else:
        return device
    raise FedhmError(f"engine.device = '{name}' cannot be used with this PyTorch: {reason}")


def is_in_use(device: torch.device) -> bool:
    """Tell whether this process has begun to use CUDA or XPU: after that, forked processes cannot."""
    return device.type in ("cuda", "xpu") and bool(torch.get_device_module(device).is_initialized())


def free_memory(device: torch.device) -> int:
    """Return the free bytes of an accelerator; a guess if it does not tell. The process begins to use the device."""
    module: Any = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        free, _ = module.mem_get_info(device)
        return int(free)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return UNKNOWN_MEMORY


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. The host does not wait for the copy."""
    if tensor.device == device:
        return tensor
    if device.type in PINNED_KINDS and tensor.device == CPU:
        tensor = tensor.pin_memory()  # only from there is a copy asynchronous
    return tensor.to(device, non_blocking=True)


class CopyStream:
    """Copies tensors to a device beside its other work, where the device has streams: CUDA, ROCm and XPU.

    A copy on the stream of the computations would begin when these are done. On a stream of its own it begins at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, None if device == CPU else _streams(device)
        self._stream: Any = self._module.Stream(device=device) if self._module else None

    def copy(self, tensors: Sequence[Tensor]) -> "CopiedTensors":
        """Begin to copy tensors from the host."""
        if self._module is None:
            return CopiedTensors([copy_to_device(tensor, self._device) for tensor in tensors])
        with self._module.stream(self._stream):
            copied = [copy_to_device(tensor, self._device) for tensor in tensors]
            return CopiedTensors(copied, self._module, self._stream.record_event())


class CopiedTensors:
    """Tensors on their way to a device. `copied` is the event of their arrival; None: no stream has to wait for it."""

    def __init__(self, tensors: Sequence[Tensor], module: Any = None, copied: Any = None) -> None:
        self._tensors, self._module, self._copied = tensors, module, copied

    def wait(self) -> Sequence[Tensor]:
        """Return the tensors. The device's later work waits for their copies, and the host does not."""
        if self._copied is not None:
            stream = self._module.current_stream(self._tensors[0].device)
            stream.wait_event(self._copied)
            for tensor in self._tensors:
                tensor.record_stream(stream)  # their memory is not used again before this work is done
        return self._tensors


def _streams(device: torch.device) -> Any:
    """Return torch's module of a device that has streams; None if it has none."""
    module = torch.get_device_module(device)
    return module if all(hasattr(module, name) for name in ("Stream", "stream", "current_stream")) else None


def move_tensors(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return tensors on another device, contiguous. All of them travel in one copy: each copy takes a fixed time.

    A copy to the CPU waits for everything that the other device has to do before.
    """
    if not tensors:
        return {}
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # then all are aligned to their type
    parts = [tensors[name].detach().contiguous().view(-1).view(torch.uint8) for name in names]
    flat = copy_to_device(torch.cat(parts), device) if device != CPU else torch.cat(parts).cpu()
    moved = {
        name: part.view(tensors[name].dtype).view(tensors[name].shape)
        for name, part in zip(names, flat.split([len(part) for part in parts]), strict=True)
    }
    # on the host, each tensor gets memory of its own: some are kept for long, and others are not
    return {name: moved[name].clone() if device == CPU else moved[name] for name in tensors}


@contextmanager
def seeded(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Seed torch's global generators, and restore them afterwards. Dropout and similar layers use no others.

    `torch.manual_seed` seeds every kind of device, which takes longer than a training step of a small network.
    """
    several = device.type in ("cuda", "xpu")  # of which each has a generator
    with torch.random.fork_rng([device] if several else [], device_type=device.type if several else "cuda"):
        torch.default_generator.manual_seed(seed)
        module: Any = None if device == CPU else torch.get_device_module(device)
        if several:
            with module.device(device):
                module.manual_seed(seed)
        elif hasattr(module, "manual_seed"):
            module.manual_seed(seed)
        yield


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms, if wanted: results on a device do not depend on the order of its threads.

    An operation that has none raises, and says so.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA begins
    before, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = benchmark


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
