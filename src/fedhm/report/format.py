"""Numbers as tables and plots show them: bytes, parameters and MACs in readable units.

`config.units` has the opposite direction: it reads the sizes that people write into configs.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fedhm.config.units import readable_size

MISSING = "–"  # a number that is unknown or does not apply


class _Unit(NamedTuple):
    size: float  # numbers from here on have this unit
    name: str
    decimals: int


_PARAMETERS = (_Unit(1, "", 0), _Unit(1e3, "k", 1), _Unit(1e6, "M", 2), _Unit(1e9, "G", 2))
_MACS = (_Unit(1, "", 0), _Unit(1e3, "k", 1), _Unit(1e6, "M", 1))
_TOTAL_MACS = (_Unit(1e6, "M", 1), _Unit(1e9, "G", 1), _Unit(1e12, "T", 1))
_PREFIXES = {1e-6: "µ", 1e-3: "m", 1: "", 1e3: "k", 1e6: "M", 1e9: "G", 1e12: "T", 1e15: "P"}


def format_bytes(count: float | None) -> str:
    """Return a number of bytes: `12.34 MB`."""
    return MISSING if count is None else readable_size(count)


def format_memory(count: int) -> str:
    """Return a number of bytes in a column of megabytes: `1,234.5 MB`."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else readable_size(count)


def format_parameters(count: float) -> str:
    """Return a number of parameters: `11.17 M`, `33.4 k`, `300`."""
    return _with_unit(count, _PARAMETERS)


def format_macs(count: int) -> str:
    """Return the MACs of one sample: `37.1 M`."""
    return _with_unit(count, _MACS)


def format_total_macs(count: float | None) -> str:
    """Return the MACs of a whole training: `1.9 T`."""
    return MISSING if count is None else _with_unit(count, _TOTAL_MACS)


def format_si(value: float, unit: str) -> str:
    """Return a value with four digits and an SI prefix: `12.34 MB`, `1,234 s`."""
    scale = axis_scale([value], unit)
    return f"{value / scale.size:,.4g} {scale.name}".strip()


class AxisScale(NamedTuple):
    """The unit of all numbers along an axis."""

    size: float  # values are divided by it
    name: str  # such as MB; empty: plain numbers


def axis_scale(values: Iterable[float], unit: str) -> AxisScale:
    """Return the largest unit that some of the values reach. Nobody counts time in ks."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    usual = [size for size in _PREFIXES if size <= 1 or unit != "s"]
    size = max((size for size in usual if largest >= size), default=1.0)
    return AxisScale(size, f"{_PREFIXES[size]}{unit}")


def _with_unit(count: float, units: Sequence[_Unit]) -> str:
    """Use the largest unit that the number reaches, or the smallest unit there is. 999,999 is 1.00 M, not 1,000.0 k."""
    rounded = float(f"{count:.4g}")
    unit = max((each for each in units if rounded >= each.size), default=units[0])
    return f"{count / unit.size:,.{unit.decimals}f} {unit.name}".strip()
