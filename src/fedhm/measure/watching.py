"""Look at every operation of torch, without torch's compiler.

Torch keeps its compiler away from whatever watches operations, and imports it to do so, which takes about as long as a
small run. Where nothing has imported it, nothing is compiled.
"""

import sys
from collections.abc import Callable
from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode


class Watch(TorchDispatchMode):
    """Sees every operation inside its context, by `__torch_dispatch__`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def flop_counter(formulas: dict[Any, Callable[..., int]], by_module: bool = True) -> FlopCounterMode:
    """Return torch's counter of flops, with formulas for operations that it does not know.

    Not `by_module`, it counts those of the whole alone: following the modules takes longer than a small network does.
    """
    kind = FlopCounterMode if "torch._dynamo" in sys.modules else _FlopCounter
    counter = kind(display=False, custom_mapping=formulas)
    if not by_module:
        counter.mod_tracker = _OneModule()  # type: ignore[assignment]
    return counter


class _OneModule:
    """Follows no modules: all operations are the whole's, as the counter calls it."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _FlopWatch(_FlopCounterMode):
    __torch_dispatch__ = getattr(_FlopCounterMode.__torch_dispatch__, "__wrapped__", None) or (
        _FlopCounterMode.__torch_dispatch__  # of a torch that does not wrap it
    )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _FlopCounter(FlopCounterMode):
    def __enter__(self) -> Self:
        self.flop_counts.clear()
        self.mod_tracker.__enter__()
        self.mode = _FlopWatch(self)
        self.mode.__enter__()  # type: ignore[no-untyped-call]
        return self
