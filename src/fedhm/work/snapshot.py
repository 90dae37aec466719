"""What a network was like when it was new, and how it becomes so again.

A network is more than its state: buffers that are not saved, networks in plain lists, counters that its `forward`
keeps. All of it is found as `copy.deepcopy` would find it, and put back: a network that has been restored computes what
a new copy does.
"""

import copyreg
import weakref
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

# What cannot change, or what copies of a network share anyway
FIXED = (
    bool, int, float, complex, str, bytes, type(None), type, range, Enum, FunctionType, BuiltinFunctionType, ModuleType,
    weakref.ref, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class OpaqueError(Exception):
    """A network holds something into which one cannot look, such as a random generator."""


class Snapshot:
    """Taken of a new network. Tensors that are to be loaded before each use need not be remembered."""

    def __init__(self, network: nn.Module, loaded: Iterable[Tensor] = ()) -> None:
        self._containers: list[tuple[Any, Any]] = []  # dicts, lists and sets, each with a copy as it was
        self._tensors: list[Tensor] = []
        self._seen: dict[int, Any] = {}
        self._look(network)
        self._forms = [_form(tensor) for tensor in self._tensors]
        tensors_at = Counter(_memory(tensor) for tensor in self._tensors)
        self._alone = {id(tensor) for tensor in self._tensors if tensors_at[_memory(tensor)] == 1}
        left_out = {id(tensor) for tensor in loaded}
        self._values = {id(t): t.detach().clone() for t in self._tensors if id(t) not in left_out}

    @torch.no_grad()
    def restore(self, loaded: Iterable[Tensor] = ()) -> bool:
        """Puts everything back but what is about to be loaded; False if that needs a new network.

        It does if a tensor took another form, or was neither remembered nor is it to be loaded.
        """
        left_out = {id(tensor) for tensor in loaded}
        for container, before in self._containers:
            if _differs(container, before):
                _refill(container, before)
        if [_form(tensor) for tensor in self._tensors] != self._forms:
            return False
        for tensor in self._tensors:
            tensor.grad = None
            if id(tensor) not in left_out:
                if id(tensor) not in self._values:
                    return False
                tensor.copy_(self._values[id(tensor)])
        return True

    def alone(self, tensor: Tensor) -> bool:
        """May it move to other memory, since no other tensor of the network lies where it does?"""
        return id(tensor) in self._alone

    def _look(self, value: Any) -> None:
        if isinstance(value, FIXED) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._tensors.append(value)
            self._look_inside(vars(value))
        elif isinstance(value, dict | list | set):
            self._look_inside(value)
        elif isinstance(value, tuple | frozenset):
            for part in value:
                self._look(part)
        elif isinstance(value, nn.Module):
            self._look_inside(vars(value))
        elif isinstance(value, MethodType):
            self._look(value.__self__)
        elif isinstance(value, partial):
            self._look((value.func, value.args, value.keywords))
        elif _is_plain(value):
            self._look_inside(vars(value))
        else:
            raise OpaqueError(type(value).__name__)

    def _look_inside(self, container: Any) -> None:
        self._containers.append((container, container.copy()))
        for part in container.values() if isinstance(container, dict) else container:
            self._look(part)


def _is_plain(value: Any) -> bool:
    """Are its attributes all that an object is?"""
    if getattr(type(value), "__getstate__", None) is not getattr(object, "__getstate__"):  # noqa: B009
        return False
    try:
        make, arguments, state, *items = value.__reduce_ex__(4)
    except (TypeError, ValueError):  # some objects of C cannot be copied
        return False
    bare = make is getattr(copyreg, "__newobj__") and arguments == (type(value),) and not any(items)  # noqa: B009
    return bare and hasattr(value, "__dict__") and (state is None or isinstance(state, dict))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _differs(container: Any, before: Any) -> bool:
    """Other things, or in another order. Equal ones are not the same: they may change apart."""
    if len(container) != len(before):
        return True
    if isinstance(container, set):
        return {id(part) for part in container} != {id(part) for part in before}
    if not all(map(is_, container, before)):
        return True
    return isinstance(container, dict) and not all(map(is_, container.values(), before.values()))


def _refill(container: Any, before: Any) -> None:
    if isinstance(container, list):
        container[:] = before
        return
    container.clear()
    container.update(before)
