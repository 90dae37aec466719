"""The bytes of all living tensors, followed from the operation that makes each to its end."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedhm.machine.allocator import SMALLEST
from fedhm.measure.watching import Watch

# oneDNN convolves copies of the weights in an order of its own, and sums their gradients in such a copy too.
COPIES = {torch.ops.aten.convolution.default: (1, 1), torch.ops.aten.convolution_backward.default: (2, 2)}

# It generates code for every different convolution, and keeps that: about so many bytes, whatever the sizes of the
# tensors (`benchmarks/convolution_code.py` measures them).
FORWARD, OF_INPUTS, OF_WEIGHTS = 90_000, 120_000, 50_000


class AliveBytes(Watch):
    """Knows how many bytes are alive, and how many were at most, with what convolutions take while they run."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._small = self._heap = 0  # bytes in small blocks: now, and at most
        self._known: set[int] = set()
        self._convolutions: dict[tuple[Any, ...], int] = {}  # different ones, and the bytes of their code

    @property
    def kept(self) -> int:
        """Return the bytes that convolutions keep, whether they run or not."""
        return sum(self._convolutions.values())

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage._cdata)
        self._count(size)
        weakref.finalize(storage, self._gone, storage._cdata, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._count(-size)

    def _count(self, size: int) -> None:
        self.alive += size
        if abs(size) < SMALLEST:
            self._small += size
            self._heap = max(self._heap, self._small)
        self.peak = max(self.peak, self.resident)

    @property
    def resident(self) -> int:
        """Return the bytes that the living take, and those in small blocks that were freed: they stay in the heap."""
        return self.alive - self._small + self._heap

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        if func in COPIES:
            position, copies = COPIES[func]
            self.peak = max(self.peak, self.resident + copies * args[position].nbytes)
            self._convolutions[_kind(func, args)] = _code(func, args)
        return result


def _kind(func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return all that decides which code a convolution runs."""
    return func, *(tuple(a.shape) if isinstance(a, Tensor) else str(a) for a in args)


def _code(func: Any, args: Sequence[Any]) -> int:
    if func is torch.ops.aten.convolution.default:
        return FORWARD
    of_inputs, of_weights, _ = args[-1]
    return int(of_inputs * OF_INPUTS + of_weights * OF_WEIGHTS)
