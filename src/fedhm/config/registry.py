"""Methods, objectives and kinds of client work by their names: those of this library, and those of other packages.

What comes with the library is a module `fedhm.GROUP.NAME` that says `ENTRY_POINT = …`. Another package names the same
kind of object in its own metadata, as in a `pyproject.toml`:

    [project.entry-points."fedhm.methods"]
    mine = "my_package:MyMethod"

Nothing is imported before it is asked for by its name, so settings can be read without knowing what they are for.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any, Literal

from fedhm.errors import FedhmError

Group = Literal["methods", "objectives", "work"]
CALLED: dict[Group, str] = {"methods": "method", "objectives": "objective", "work": "kind of client work"}
FIRST = "fedhm"  # in all lists: what the library is named after


class UnknownNameError(FedhmError):
    """A name that nobody provides anything for."""


_provided: dict[tuple[Group, str], Any] = {}


def register(group: Group, name: str, thing: Any) -> None:
    """Make something known by its name in this process alone, as in a notebook; packages have entry points."""
    _provided[group, name] = thing


def find(group: Group, name: str) -> Any:
    """Return what a name stands for."""
    if (group, name) not in _provided:
        _provided[group, name] = _found(group, name)
    return _provided[group, name]


def make(group: Group, name: str) -> Any:
    """Return what a name stands for with its default settings."""
    return find(group, name)()


def known(group: Group) -> list[str]:
    """Return every name that `find` takes."""
    own = [name for name in _modules(group) if _of_module(group, name) is not None]
    provided = [name for its_group, name in _provided if its_group == group]
    names = {*own, *provided, *(point.name for point in entry_points(group=f"fedhm.{group}"))}
    return sorted(names, key=lambda name: (name != FIRST, name))


def _found(group: Group, name: str) -> Any:
    if name in _modules(group) and (own := _of_module(group, name)) is not None:
        return own
    for point in entry_points(group=f"fedhm.{group}", name=name):
        try:
            return point.load()
        except Exception as error:  # whatever another package raises when it is imported
            raise FedhmError(f"the {CALLED[group]} '{name}' cannot be loaded from {point.value}: {error!r}") from error
    raise UnknownNameError(f"there is no {CALLED[group]} '{name}', known are {', '.join(known(group))}")


@cache
def _modules(group: Group) -> frozenset[str]:
    return frozenset(module.name for module in iter_modules(import_module(f"fedhm.{group}").__path__))


def _of_module(group: Group, name: str) -> Any:
    return getattr(import_module(f"fedhm.{group}.{name}"), "ENTRY_POINT", None)
