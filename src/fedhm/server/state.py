"""A state as named tensors plus JSON, and back by its types. Checkpoints store it, and filters change its tensors.

A value is a tensor, a plain value, or a dict, tuple, named tuple or dataclass of values. Each tensor is named by its
path through the fields and keys. The outline is the value as JSON, with the tensors' names in place of the tensors.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import quote

from torch import Tensor

from fedhm.errors import FedhmError
from fedhm.networks.exchange import Tensors

Value = TypeVar("Value")
TensorPath = tuple[str, ...]  # the fields and keys that lead to a tensor
PLAIN = (bool, int, float, str, NoneType)


def flatten(value: Any) -> tuple[Tensors, Any]:
    """Return the tensors in a value by their names, and its outline. A tensor that occurs twice has its first name."""
    tensors: Tensors = {}
    names: dict[int, str] = {}

    def outline(part: Any, path: TensorPath) -> Any:
        if isinstance(part, Tensor):
            name = names.setdefault(id(part), "/".join(quote(step, safe="") for step in path))  # a key may hold a slash
            tensors[name] = part
            return name
        if isinstance(part, PLAIN):
            return part
        if isinstance(part, dict):
            return {str(key): outline(inner, (*path, str(key))) for key, inner in part.items()}
        if (named := _named_parts(part)) is not None:
            return {name: outline(inner, (*path, name)) for name, inner in named.items()}
        if isinstance(part, tuple | list):
            return [outline(inner, (*path, str(number))) for number, inner in enumerate(part)]
        raise TypeError(f"a state cannot hold a {type(part).__name__} ({'/'.join(path)})")

    return tensors, outline(value, ())


def unflatten(kind: type[Value], tensors: Tensors, outline: Any) -> Value:
    """Return the value that `flatten` was given; raises ValueError if it was of another kind."""
    try:
        read: Value = _read(kind, tensors, outline)
    except (KeyError, TypeError, AttributeError, NameError, ValueError) as error:
        raise ValueError(f"it is not a {kind.__name__}: {error!r}") from error
    return read


def check_state(state: Any, kind: type[Any]) -> None:
    """Refuse a state that could not be read back from a checkpoint, before a checkpoint is written."""
    if type(state) is not kind:
        own = type(state).__name__
        raise FedhmError(
            f"the method's state is a {own}, but its state_type is {kind.__name__}: set state_type = {own}"
        )
    try:
        unflatten(kind, *flatten(state))
    except (TypeError, ValueError) as error:
        raise FedhmError(f"the method's state cannot be written to a checkpoint and read back: {error}") from error


def map_tensors(value: Value, change: Callable[[str, TensorPath, Tensor], Tensor]) -> Value:
    """Return the value with every tensor changed; `change` gets its name, its path and the tensor."""

    def apply(part: Any, path: TensorPath) -> Any:
        if isinstance(part, Tensor):
            return change("/".join(quote(step, safe="") for step in path), path, part)
        if isinstance(part, dict):
            return {key: apply(inner, (*path, str(key))) for key, inner in part.items()}
        if (named := _named_parts(part)) is not None:
            return type(part)(**{name: apply(inner, (*path, name)) for name, inner in named.items()})
        if isinstance(part, tuple | list):
            return type(part)(apply(inner, (*path, str(number))) for number, inner in enumerate(part))
        return part

    changed: Value = apply(value, ())
    return changed


def _named_parts(value: Any) -> dict[str, Any] | None:
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    names: tuple[str, ...] | None = getattr(value, "_fields", None)  # of a named tuple
    return None if names is None else dict(zip(names, value, strict=True))


def _read(kind: Any, tensors: Tensors, outline: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Tensor:
        return tensors[outline]
    if kind in PLAIN or kind is Any:
        return outline
    if origin in (Union, UnionType):
        (inner,) = (each for each in arguments if each is not NoneType)
        return None if outline is None else _read(inner, tensors, outline)
    if origin is dict:
        key, inner = arguments
        return {key(name): _read(inner, tensors, part) for name, part in outline.items()}
    if origin in (tuple, list):
        kinds = arguments[:1] * len(outline) if origin is list or arguments[-1:] == (...,) else arguments
        return origin(_read(each, tensors, part) for each, part in zip(kinds, outline, strict=True))
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = get_type_hints(kind)
        return kind(**{name: _read(hints[name], tensors, part) for name, part in outline.items()})
    raise TypeError(f"a state cannot hold a {kind}")
