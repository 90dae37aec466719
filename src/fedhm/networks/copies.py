"""Deep copies of networks, as `copy.deepcopy` makes them, in a tenth of the time.

A task trains a copy of its network, and of a small one the copying takes longer than a step: each module has a dozen
empty collections of hooks, and torch copies a tensor in twenty small steps. What is not known here to be ordinary is
copied by `copy.deepcopy`, with the same memory of what was copied already.
"""

import copy
import copyreg
from collections import OrderedDict
from dataclasses import is_dataclass
from fractions import Fraction
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

Memo = dict[Any, Any]
ATOMIC = {
    *(type(None), bool, int, float, complex, str, bytes, Fraction, type, FunctionType, BuiltinFunctionType),
    *(torch.dtype, torch.Size),
}
COLLECTIONS = {dict, OrderedDict, set}


def deep_copy(value: Any, memo: Memo) -> Any:
    """Return a copy of a network, or of anything that one holds; `memo` is that of `copy.deepcopy`."""
    kind: Any = type(value)
    if kind in ATOMIC:
        return value
    if (known := memo.get(id(value))) is not None:
        return known
    if kind is Tensor:
        return copied_tensor(value, memo)
    if kind in COLLECTIONS:
        return _entries(value, memo)
    if kind is list:
        copies = memo[id(value)] = []
        copies.extend(deep_copy(entry, memo) for entry in value)
        return copies
    if kind is tuple and all(type(entry) in ATOMIC for entry in value):
        return value
    if _is_ordinary(kind) and "__deepcopy__" not in vars(value):
        thing = memo[id(value)] = kind.__new__(kind)
        held = value.__getstate__() or {}
        memo.setdefault(id(memo), []).append(held)  # as long as its entries' ids stand for them
        state = _entries(held, memo)
        thing.__setstate__(state) if isinstance(thing, nn.Module) else vars(thing).update(state)
        return thing
    return copy.deepcopy(value, memo)


def _entries(collection: Any, memo: Memo) -> Any:
    """Return a copy of a dict or a set. Most are empty, or have entries that need none."""
    if not collection:
        return memo.setdefault(id(collection), type(collection)())
    if type(collection) is set:
        return copy.deepcopy(collection, memo)
    entries = memo[id(collection)] = type(collection)()
    for key, entry in collection.items():
        if type(key) not in ATOMIC:
            key = deep_copy(key, memo)
        entries[key] = entry if type(entry) in ATOMIC else deep_copy(entry, memo)
    return entries


def copied_tensor(tensor: Tensor, memo: Memo) -> Tensor:
    """Return a copy of a tensor; those that share their memory share it in the copy, too."""
    new = _cloned(tensor, memo)
    if new is None:
        slowly: Tensor = copy.deepcopy(tensor, memo)
        return slowly
    memo[id(tensor)] = new
    return new


def _cloned(tensor: Tensor, memo: Memo) -> Tensor | None:
    """Return a copy that is just like the tensor, or None if only torch knows how that is made."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.is_leaf:
        return None
    if vars(tensor) or tensor.grad is not None or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    memory, shared = tensor.untyped_storage(), memo.setdefault("torch", {})
    if memory._cdata in shared or not memory.nbytes() == tensor.numel() * tensor.element_size() > 0:
        return None  # it is, or may be, a part of what others have, too
    new = tensor.detach().clone(memory_format=torch.preserve_format)
    if new.stride() != tensor.stride():
        return None
    shared[memory._cdata] = new.untyped_storage()
    return new.requires_grad_(tensor.requires_grad)


@cache
def _is_ordinary(kind: type) -> bool:
    """Tell whether this is a module, or a dataclass, of which a copy is made of a copy of its state."""
    if not issubclass(kind, nn.Module) and (not is_dataclass(kind) or len(kind.__mro__) > 2):
        return False
    usual = all(getattr(kind, name) is getattr(object, name) for name in ("__new__", "__reduce__", "__reduce_ex__"))
    special = ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__")
    slots: list[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    own = any(hasattr(kind, name) for name in special) or kind in copyreg.dispatch_table
    return usual and not slots and not own and (issubclass(kind, nn.Module) or not hasattr(kind, "__setstate__"))
