"""The bytes of all living tensors, followed from the operation that makes each to its end."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedhm.measure.watching import Watch

# oneDNN convolves copies of the weights in an order of its own, and sums their gradients in such a copy too; beside
# these it keeps a workspace, of about this size whatever the layer (`benchmarks/memory.py` measures both).
COPIES = {torch.ops.aten.convolution.default: (1, 1), torch.ops.aten.convolution_backward.default: (2, 2)}
WORKSPACE = 4 * 2**20


class AliveBytes(Watch):
    """Knows how many bytes are alive, and how many were at most, with what convolutions take while they run."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.kept = 0  # by convolutions, once there was one
        self._known: set[int] = set()

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
            self.kept = WORKSPACE
        return result
