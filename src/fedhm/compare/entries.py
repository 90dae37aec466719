"""What the names in --methods stand for: each is one entry of a comparison, or a family of them."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fedhm.compare.reference import Reference
from fedhm.config.method import tier_name
from fedhm.errors import FedhmError

Settings = dict[str, Any]  # of a [method] section


@dataclass(frozen=True)
class Entry:
    """A method with its settings, which is run once for each seed."""

    label: str
    method: Settings


def entries(names: Sequence[str], reference: Reference) -> list[Entry]:
    """The entries that `names` stand for, each once."""
    found: dict[str, Entry] = {}
    for name in names:
        for entry in _entries(name, reference):
            found.setdefault(entry.label, entry)
    if not found:
        raise FedhmError(f"there is no method to compare: known are {', '.join(known())}")
    return list(found.values())


def known() -> list[str]:
    return [*SINGLE, *FAMILIES]


def _entries(name: str, reference: Reference) -> Iterator[Entry]:
    kind, colon, member = name.partition(":")
    if kind in FAMILIES:
        family = FAMILIES[kind]
        members = [member] if colon else [f"{value:.12g}" for value in family.values(reference) if value < 1]
        if not members:
            raise FedhmError(f"{kind} has nothing to train: there is no tier below the full model")
        yield from (Entry(f"{kind}:{_called(kind, value)}", family.settings(reference, value)) for value in members)
    elif kind in SINGLE and not colon:
        yield Entry(kind, reference.given_settings(kind) or SINGLE[kind](reference))
    elif kind in SINGLE:
        raise FedhmError(f"--methods {name}: only {' and '.join(FAMILIES)} are followed by a colon and a size")
    else:
        near = difflib.get_close_matches(kind, known(), n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise FedhmError(f"--methods: there is no '{name}', {hint}known are {', '.join(known())}")


def _called(kind: str, value: str) -> str:
    """A size has one name, however it was written; what is no number is refused where settings are read."""
    try:
        numerator, _, denominator = value.partition("/")
        number = float(numerator) / float(denominator or 1)
    except (ValueError, ZeroDivisionError):
        return value
    return tier_name(number) if kind == "lowrank" else f"{number:g}"


def _replaced(levels: Sequence[Any], name: str, count: int) -> list[Any]:
    """The `count` largest levels give way to the next smaller one."""
    if len(levels) <= count:
        raise FedhmError(f"{name} needs at least {count + 1} tiers, but there are {len(levels)}")
    return [levels[count]] * (count + 1) + list(levels[count + 1 :])


def _fedhm(reference: Reference, **changes: Any) -> Settings:
    return {**reference.fedhm.model_dump(mode="json"), **changes}


def _low_rank(reference: Reference, ratio: float | str, **changes: Any) -> Settings:
    """One tier for everybody, as FedHM trains it."""
    return {"name": "fedhm", "tiers": [ratio], "keep": reference.fedhm.keep, **changes}


def _slimming(name: str) -> Callable[[Reference], Settings]:
    return lambda reference: {"name": name, "tiers": reference.widths}


def _split_mix(reference: Reference) -> Settings:
    return {"name": "splitmix", "base": min(reference.widths), "tiers": reference.bases}


def _pufferfish(reference: Reference) -> Settings:
    return _low_rank(reference, min(reference.ratios), form="pufferfish", warmup=max(1, reference.rounds // 10))


@dataclass(frozen=True)
class Family:
    """One entry for each size below the full model: the same network on every client."""

    values: Callable[[Reference], Sequence[float]]
    settings: Callable[[Reference, str], Settings]


SINGLE: dict[str, Callable[[Reference], Settings]] = {
    "fedhm": _fedhm,
    "fedhm-updates": lambda r: _fedhm(r, aggregate="updates"),
    "fedhm-v2": lambda r: _fedhm(r, tiers=_replaced(r.ratios, "fedhm-v2", 1)),
    "fedhm-v3": lambda r: _fedhm(r, tiers=_replaced(r.ratios, "fedhm-v3", 2)),
    "heterofl": _slimming("heterofl"),
    "heterofl-v2": lambda r: {"name": "heterofl", "tiers": _replaced(r.widths, "heterofl-v2", 1)},
    "heterofl-v3": lambda r: {"name": "heterofl", "tiers": _replaced(r.widths, "heterofl-v3", 2)},
    "fedrolex": _slimming("fedrolex"),
    "fjord": _slimming("fjord"),
    "splitmix": _split_mix,
    "fedavg": lambda _: {"name": "fedavg"},
    "pufferfish": _pufferfish,
    "fedpara": lambda r: {"name": "fedpara", "keep": r.fedhm.keep},
    "feddlr": lambda r: {"name": "feddlr", "tier": min(r.ratios), "keep": r.fedhm.keep},
    "fedmd": _slimming("fedmd"),
    "feddf": _slimming("feddf"),
}
FAMILIES = {
    "lowrank": Family(lambda r: sorted(set(r.ratios), reverse=True), _low_rank),
    "slimmed": Family(lambda r: sorted(set(r.widths), reverse=True), lambda _, w: {"name": "slimmed", "width": w}),
}
