"""Sizes, rates and counts as people write them: "128MB", "1.5 GiB", "10Mbit", "2MB/s", "300k".

We do not use pydantic's `ByteSize`: it ignores what it cannot read, so that "12,5MB" is 12 bytes and "2MB/s" a size. It
takes True and 0, and refuses 128.7 and "1e3". It would also import pydantic for `fedhm --help`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

_NUMBER_AND_UNIT = re.compile(r"([-+]?[\d.]+(?:e[-+]?\d{1,3})?)\s*([^\d\s]*)", re.IGNORECASE)

BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
COUNTS = {"k": 10**3, "M": 10**6, "G": 10**9}
_BITS = {"bit": 1 / 8, "kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
_RATES = {f"{unit}{a_second}": size for unit, size in (_BITS | BYTES).items() for a_second in ("", "/s")}


def readable_size(count: float) -> str:
    """Return a number of bytes as people read it: 12.34 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    return f"{count:,.2f} GB"


class ParsedNumber(NamedTuple):
    """A number with a unit. Callers have the words for errors."""

    number: float  # NaN: the text does not begin with a number
    unit: str = ""
    factor: float | None = 1  # None: an unknown unit


def _parse(given: object, units: Mapping[str, float]) -> ParsedNumber:
    """Read a number with one of `units` or none. Case does not matter: nobody means milli by m."""
    known = isinstance(given, int | float | str) and not isinstance(given, bool)
    found = _NUMBER_AND_UNIT.fullmatch(str(given).strip()) if known else None
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:  # 1.2.3
        number = math.nan
    if found is None or not math.isfinite(number):
        return ParsedNumber(math.nan)
    named = {name.lower(): factor for name, factor in units.items()} | {"": 1}
    return ParsedNumber(number, found[2], named.get(found[2].lower()))


def parse_size(given: str | float) -> int:
    """Return the bytes of a size such as "128MB" or "64 MiB"; a plain number is bytes.

    kB, MB and GB count in thousands, KiB, MiB and GiB in 1024s. Raises ValueError for anything else, and below 1 byte.
    """
    number, _, factor = _parse(given, BYTES)
    if math.isnan(number):
        raise ValueError(f"{given!r} is no size: write it like 128MB or 64MiB")
    if factor is None:
        raise ValueError(f"{given!r} is no size: units are B, kB, MB, GB, KiB, MiB and GiB")
    if not 1 <= number * factor < 2**63:
        raise ValueError(f"{given!r} is no size: it must be above 0, and below 2⁶³ bytes")
    return int(number * factor)


def parse_rate(given: str | float) -> float:
    """Return the bytes a second of a rate such as "10Mbit" or "1.25MB/s"; a plain number is bytes a second.

    Raises ValueError for anything else, and for rates that are not above 0.
    """
    number, _, factor = _parse(given, _RATES)
    if math.isnan(number):
        raise ValueError(f"{given!r} is no rate: write it like 10Mbit or 2MB/s")
    if factor is None:
        raise ValueError(f"{given!r} is no rate: units are bit, kbit, Mbit, Gbit, kB/s, MB/s and GB/s")
    if not 0 < number * factor < math.inf:
        raise ValueError(f"{given!r} is no rate: it must be above 0")
    return float(number * factor)


Kind = Literal["memory", "bytes", "macs", "parameters"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def parse_amount(given: float | str, kind: Kind) -> int:
    """Return the amount that a budget of this kind names: "128MB", "300k" or a plain number; raises ValueError."""
    units = _units(kind)
    shown = str(given)[:40]
    number, unit, factor = _parse(given, units)
    if math.isnan(number):
        example = "128MB, 2MiB" if units is BYTES else "300k, 1.5M"
        raise ValueError(f"{kind} takes a size such as {example} or a plain number, not '{shown}'")
    if factor is None:
        raise ValueError(f"{kind}: there is no unit '{unit[:20]}', only {', '.join(units)}")
    if number * factor < 1:
        raise ValueError(f"{kind} must be at least 1, not '{shown}'")
    if number * factor > 2**62:
        raise ValueError(f"{kind} = '{shown}' is more than any device has")
    return int(number * factor)


def _units(kind: Kind) -> Mapping[str, int]:
    return BYTES if kind in ("memory", "bytes") else COUNTS


def amount_text(amount: int, kind: Kind) -> str:
    """Return the shortest text that `parse_amount` reads as exactly this amount."""
    texts = [f"{amount / size:.6g}{unit}" for unit, size in _units(kind).items() if amount >= size]
    exact = [text for text in texts if parse_amount(text, kind) == amount]
    return min(exact, key=len, default=str(amount))


@dataclass(frozen=True)
class Budget:
    """The limits of a tier: amounts by kind, or the costs of the version at a rank ratio (1/8)."""

    limits: Mapping[Kind, int | Fraction]

    @property
    def name(self) -> str:
        """Return the tier's name everywhere: memory:128MB, or memory:128MB,bytes:2MB."""
        return ",".join(f"{kind}:{self._text(kind)}" for kind in KINDS if kind in self.limits)

    def _text(self, kind: Kind) -> str:
        limit = self.limits[kind]
        return str(limit) if isinstance(limit, Fraction) else amount_text(limit, kind)


def parse_budget(given: object) -> Budget:
    """Read "memory:128MB", "memory:128MB,bytes:2MB", or a table { bytes = "2MB" }; raises ValueError."""
    if isinstance(given, str):
        parts = [part.partition(":") for part in given.split(",")]
        if any(not colon for _, colon, _ in parts):
            raise ValueError(f'\'{given[:80]}\' is neither a rank ratio, such as "1/8", nor a budget: "memory:128MB"')
        pairs = [(kind.strip(), text.strip()) for kind, _, text in parts]
        given = dict(pairs)
        if len(given) != len(pairs):
            raise ValueError("a budget names one kind twice")
    if not isinstance(given, Mapping) or not given:
        raise ValueError('a budget is written "memory:128MB" or { bytes = "2MB" }')
    if unknown := [str(kind)[:40] for kind in given if kind not in KINDS]:
        raise ValueError(f"there is no budget of '{unknown[0]}', only of {', '.join(KINDS)}")
    return Budget({kind: _parse_limit(given[kind], kind) for kind in KINDS if kind in given})


def parse_share(given: str) -> float:
    """Return the share of the parameters that a tier such as "12%" asks for: 0.12; raises ValueError."""
    number, unit, _ = _parse(given, {"%": 1 / 100})
    if math.isnan(number) or unit != "%" or not 0 < number <= 100:
        raise ValueError(f"'{given[:40]}' is no share of the parameters: write it like 50%, above 0% and at most 100%")
    return number / 100


def share_name(share: float) -> str:
    """Return the name of a tier that is a share: 50%."""
    return f"{100 * share:g}%"


def is_share(tier: object) -> bool:
    """Tell whether a tier is a share of the parameters, by its name."""
    return isinstance(tier, str) and tier.endswith("%")


def _parse_limit(given: object, kind: Kind) -> int | Fraction:
    if isinstance(given, str) and "/" in given and kind != "memory":
        try:
            ratio = Fraction(given)
        except (ValueError, ZeroDivisionError):
            ratio = Fraction(0)
        if not 0 < ratio <= 1:
            raise ValueError(f"{kind} takes a size, or those of a rank ratio above 0 and at most 1, not '{given[:40]}'")
        return ratio
    if not isinstance(given, str | int | float):
        raise ValueError(f"{kind} takes a size such as 128MB, not a {type(given).__name__}")
    return parse_amount(given, kind)
