"""Numbers as tables and plots show them: bytes, parameters and MACs in readable units.

`config.units` has the opposite direction: it reads the sizes that people write into configs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fedhm.config.units import readable_size

MISSING = "–"  # a number that is unknown or does not apply


class _Unit(NamedTuple):
    size: float  # numbers from here on have this unit
    name: str
    decimals: int


_PARAMETERS = (_Unit(1e3, "k", 1), _Unit(1e6, "M", 2))
_MACS = (_Unit(1e3, "k", 1), _Unit(1e6, "M", 1))
_TOTAL_MACS = (_Unit(1e6, "M", 1), _Unit(1e9, "G", 1), _Unit(1e12, "T", 1))
_PREFIXES = {1e-6: "µ", 1e-3: "m", 1: "", 1e3: "k", 1e6: "M", 1e9: "G", 1e12: "T", 1e15: "P"}


def format_bytes(count: float | None) -> str:
    """Return a number of bytes: `12.34 MB`."""
    return MISSING if count is None else readable_size(count)


def format_memory(count: int) -> str:
    """Return a number of bytes in a column of megabytes: `1,234.5 MB`."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else readable_size(count)


def format_parameters(count: int) -> str:
    """Return a number of parameters: `11.17 M`, `33.4 k`."""
    return _with_unit(count, _PARAMETERS)


def format_macs(count: int) -> str:
    """Return the MACs of one sample: `37.1 M`."""
    return _with_unit(count, _MACS)


def format_total_macs(count: float | None) -> str:
    """Return the MACs of a whole training: `1.9 T`."""
    return MISSING if count is None else _with_unit(count, _TOTAL_MACS)


def format_si(value: float, unit: str) -> str:
    """Return a value with four digits and an SI prefix: `12.34 MB`, `1.2 ks`."""
    size = max((each for each in _PREFIXES if abs(value) >= each), default=1)
    return f"{value / size:.4g} {_PREFIXES[size]}{unit}".strip()


def _with_unit(count: float, units: Sequence[_Unit]) -> str:
    """Use the largest unit that the number reaches, or the smallest unit there is."""
    unit = max((each for each in units if count >= each.size), default=units[0])
    return f"{count / unit.size:,.{unit.decimals}f} {unit.name}"
