"""What the names in --methods stand for: each is one entry of a comparison, or a family of them.

Every method adds its own names, also one that another installed package brings.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fedhm.compare import METHODS
from fedhm.compare.reference import Reference
from fedhm.config import plugins
from fedhm.config.sections.method_config import Family, NamedEntry, Settings
from fedhm.errors import FedhmError


@dataclass(frozen=True)
class Entry:
    """A method with its settings, which is run once for each seed."""

    label: str
    method: Settings
    changes: Settings = field(default_factory=dict)  # of its own, by dotted key: what was tuned for it


def entries(names: Sequence[str], reference: Reference) -> list[Entry]:
    """Return the entries that `names` stand for, each once."""
    found: dict[str, Entry] = {}
    for name in names:
        for entry in _entries(name, reference):
            found.setdefault(entry.label, entry)
    if not found:
        raise FedhmError(f"there is no method to compare: known are {', '.join(known())}")
    return list(found.values())


def default_names(reference: Reference) -> list[str]:
    """Return the names that are compared if nothing is said, but for a method that would have no clients."""
    return [name for name in METHODS.split(",") if name != "capable" or 1 in reference.ratios]


def without_twins(found: Sequence[Entry]) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries without those that have the very settings of an earlier one, and these with that one's name.

    On the paper's own settings `fedhm` is `fedhm-paper`: the same weights twice would only take twice the time.
    """
    first: list[Entry] = []
    twins: dict[str, str] = {}
    for entry in found:
        if same := next((earlier.label for earlier in first if earlier.method == entry.method), None):
            twins[entry.label] = same
        else:
            first.append(entry)
    return first, twins


def known() -> list[str]:
    """Return every name that stands for an entry, and then those that stand for several."""
    provided = _provided()
    return sorted(provided, key=lambda name: isinstance(provided[name], Family))


def _provided() -> dict[str, NamedEntry | Family]:
    """Return what the methods say of themselves, by name; of two that use the same name the first has it."""
    provided: dict[str, NamedEntry | Family] = {}
    for name in plugins.known("methods"):
        try:
            given = plugins.find("methods", name).entries()
        except Exception:  # another package's fault, which is told to who asks for that method
            continue
        for entry in given:
            provided.setdefault(entry.name, entry)
    return provided


def _entries(name: str, reference: Reference) -> Iterator[Entry]:
    kind, colon, size = name.partition(":")
    provided = _provided()
    entry = provided.get(kind)
    if isinstance(entry, Family):
        sizes = [size] if colon else [f"{value:.12g}" for value in entry.members(reference) if value < 1]
        if not sizes:
            raise FedhmError(f"{kind} has nothing to train: there is no tier below the full model")
        yield from (Entry(f"{kind}:{_called(entry, value)}", entry.settings(reference, value)) for value in sizes)
    elif entry is None:
        raise FedhmError(f"--methods: {_unknown(kind, name)}")
    elif colon:
        families = [family for family in provided if isinstance(provided[family], Family)]
        raise FedhmError(f"--methods {name}: only {' and '.join(families)} are followed by a colon and a size")
    else:
        yield Entry(kind, reference.given_settings(kind) or entry.settings(reference))


def _unknown(kind: str, name: str) -> str:
    if kind in plugins.known("methods"):
        plugins.find("methods", kind).entries()  # says why it could not
    near = difflib.get_close_matches(kind, known(), n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"there is no '{name}', {hint}known are {', '.join(known())}"


def _called(family: Family, value: str) -> str:
    """Return the one name of a size, however it was written; what is no number is refused where settings are read."""
    try:
        numerator, _, denominator = value.partition("/")
        return family.called(float(numerator) / float(denominator or 1))
    except (ValueError, ZeroDivisionError, OverflowError):
        return value
