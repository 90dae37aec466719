"""Sizes, rates and counts as people write them: "128MB", "1.5 GiB", "10Mbit", "2MB/s", "300k"."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

_WRITTEN = re.compile(r"([-+]?[\d.]+(?:e[-+]?\d{1,3})?)\s*([^\d\s]*)", re.IGNORECASE)

BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
COUNTS = {"k": 10**3, "M": 10**6, "G": 10**9}
_BITS = {"bit": 1 / 8, "kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
_RATES = {f"{unit}{a_second}": size for unit, size in (_BITS | BYTES).items() for a_second in ("", "/s")}


def shown(count: float) -> str:
    """Return how many bytes there are as people read it: 12.34 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    return f"{count:,.2f} GB"


class Written(NamedTuple):
    """A number with a unit; who asked for it has the words for what is wrong with it."""

    number: float  # NaN: it begins with none
    unit: str = ""
    factor: float | None = 1  # None: there is no such unit


def read(given: object, units: Mapping[str, float]) -> Written:
    """Read a number with one of `units` or none, however its letters are written: nobody means milli by m."""
    known = isinstance(given, int | float | str) and not isinstance(given, bool)
    found = _WRITTEN.fullmatch(str(given).strip()) if known else None
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:  # 1.2.3
        number = math.nan
    if found is None or not math.isfinite(number):
        return Written(math.nan)
    named = {name.lower(): factor for name, factor in units.items()} | {"": 1}
    return Written(number, found[2], named.get(found[2].lower()))


def size(given: str | float) -> int:
    """Return how many bytes a size stands for: "128MB", "64 MiB"; a plain number is bytes.

    kB, MB and GB count in thousands, KiB, MiB and GiB in 1024s. Raises ValueError for what is none, or not above 0.
    """
    number, _, factor = read(given, BYTES)
    if math.isnan(number):
        raise ValueError(f"{given!r} is no size: write it like 128MB or 64MiB")
    if factor is None:
        raise ValueError(f"{given!r} is no size: units are B, kB, MB, GB, KiB, MiB and GiB")
    if not 1 <= number * factor < 2**63:
        raise ValueError(f"{given!r} is no size: it must be above 0, and below 2⁶³ bytes")
    return int(number * factor)


def rate(given: str | float) -> float:
    """Return how many bytes a second a rate stands for: "10Mbit" or "1.25MB/s"; a plain number is bytes a second.

    Raises ValueError for what is none, or not above 0.
    """
    number, _, factor = read(given, _RATES)
    if math.isnan(number):
        raise ValueError(f"{given!r} is no rate: write it like 10Mbit or 2MB/s")
    if factor is None:
        raise ValueError(f"{given!r} is no rate: units are bit, kbit, Mbit, Gbit, kB/s, MB/s and GB/s")
    if not 0 < number * factor < math.inf:
        raise ValueError(f"{given!r} is no rate: it must be above 0")
    return float(number * factor)
