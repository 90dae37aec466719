"""Memory that processes share: tensors in a file without a name, which each of them maps."""

import math
import mmap
import os
import tempfile
from typing import IO, Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, a cache line: enough for every type
SMALLEST = 1 << 16  # bytes that a file starts with

Place = tuple[int, str, list[int]]  # first byte, type, shape: plain values that can be sent


class Arena:
    """Memory for tensors. Made before a fork, it is shared by both sides; only one may put tensors in at a time."""

    def __init__(self) -> None:
        self._file = _nameless_file()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.used = 0  # bytes: what is put next comes behind them

    def put(self, tensor: Tensor) -> Place:
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        self.used = start + tensor.numel() * tensor.element_size()
        place = (start, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        self.get(place).copy_(tensor.detach())
        return place

    def get(self, place: Place) -> Tensor:
        """Return the memory at `place` itself: it changes when something else is put there."""
        start, name, shape = place
        dtype: torch.dtype = getattr(torch, name)
        end = start + math.prod(shape) * dtype.itemsize
        if end == start:
            return torch.empty(shape, dtype=dtype)
        if end > len(self._bytes):
            self._map(end)
        return self._bytes[start:end].view(dtype).view(shape)

    def close(self) -> None:
        """Close the file; the memory itself is released once no tensor lies in it any more."""
        self._file.close()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _map(self, wanted: int) -> None:
        """Map the whole file, enlarged if need be. Tensors in an older mapping lie in the same memory."""
        size = os.fstat(self._file.fileno()).st_size
        if size < wanted:
            size = max(wanted, 2 * size, SMALLEST)
            os.ftruncate(self._file.fileno(), size)
        self._bytes = torch.frombuffer(mmap.mmap(self._file.fileno(), size), dtype=torch.uint8)


def _nameless_file() -> IO[Any]:
    if hasattr(os, "memfd_create"):  # plain memory; /dev/shm often has a limit of 64 MB, beyond which writers crash
        return os.fdopen(os.memfd_create("fedhm"), "r+b", buffering=0)
    return tempfile.TemporaryFile()
