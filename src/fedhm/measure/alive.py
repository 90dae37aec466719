"""The bytes of all living tensors, followed from the operation that makes each to its end."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedhm.measure.watching import Watch

# oneDNN convolves copies of the weights in an order of its own, and sums their gradients in such a copy too.
COPIES = {torch.ops.aten.convolution.default: (1, 1), torch.ops.aten.convolution_backward.default: (2, 2)}

# It generates code for every different convolution, and keeps that: about so many bytes, whatever the sizes of the
# tensors (`benchmarks/convolution_code.py` measures them).
FORWARD, OF_INPUTS, OF_STRIDED_INPUTS, OF_WEIGHTS = 90_000, 110_000, 700_000, 50_000


class AliveBytes(Watch):
    """Knows how many bytes are alive, and how many were at most, with what convolutions take while they run."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
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
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, storage._cdata, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        if func in COPIES:
            position, copies = COPIES[func]
            self.peak = max(self.peak, self.alive + copies * args[position].nbytes)
            self._convolutions[_kind(func, args)] = _code(func, args)
        return result


def _kind(func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return all that decides which code a convolution runs."""
    return func, *(tuple(a.shape) if isinstance(a, Tensor) else str(a) for a in args)


def _code(func: Any, args: Sequence[Any]) -> int:
    if func is torch.ops.aten.convolution.default:
        return FORWARD
    strided, (of_inputs, of_weights) = max(args[4]) > 1, args[-1][:2]
    return of_inputs * (OF_STRIDED_INPUTS if strided else OF_INPUTS) + of_weights * OF_WEIGHTS
