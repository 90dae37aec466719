"""Methods, objectives and kinds of client work by name, from this library and from other packages.

In this library, the module `fedhm.GROUP.NAME` defines `ENTRY_POINT`. Another package names its object in its metadata:

    [project.entry-points."fedhm.methods"]
    mine = "my_package:MyMethod"

Nothing is imported before its name is looked up, so reading settings imports only what they name.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any, Literal

from fedhm.errors import FedhmError

Group = Literal["methods", "objectives", "work"]
CALLED: dict[Group, str] = {"methods": "method", "objectives": "objective", "work": "kind of client work"}
FIRST = "fedhm"  # in all lists


class UnknownNameError(FedhmError):
    """A name that is not registered."""


_registered: dict[tuple[Group, str], Any] = {}


def register(group: Group, name: str, thing: Any) -> None:
    """Register an object by name in this process alone, as in a notebook; packages have entry points."""
    _registered[group, name] = thing


def find(group: Group, name: str) -> Any:
    """Return the object of a name."""
    if (group, name) not in _registered:
        _registered[group, name] = _found(group, name)
    return _registered[group, name]


def make(group: Group, name: str) -> Any:
    """Return the object of a name with its default settings."""
    return find(group, name)()


def known(group: Group) -> list[str]:
    """Return every registered name."""
    own = [name for name in _modules(group) if _of_module(group, name) is not None]
    registered = [name for its_group, name in _registered if its_group == group]
    names = {*own, *registered, *(point.name for point in entry_points(group=f"fedhm.{group}"))}
    return sorted(names, key=lambda name: (name != FIRST, name))


def _found(group: Group, name: str) -> Any:
    if name in _modules(group) and (own := _of_module(group, name)) is not None:
        return own
    for point in entry_points(group=f"fedhm.{group}", name=name):
        try:
            return point.load()
        except Exception as error:  # another package may raise anything when it is imported
            raise FedhmError(f"the {CALLED[group]} '{name}' cannot be loaded from {point.value}: {error!r}") from error
    raise UnknownNameError(f"there is no {CALLED[group]} '{name}', known are {', '.join(known(group))}")


@cache
def _modules(group: Group) -> frozenset[str]:
    return frozenset(module.name for module in iter_modules(import_module(f"fedhm.{group}").__path__))


def _of_module(group: Group, name: str) -> Any:
    return getattr(import_module(f"fedhm.{group}.{name}"), "ENTRY_POINT", None)
