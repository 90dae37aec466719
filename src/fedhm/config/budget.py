"""Budgets: what a version of the model may take of a device."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from fedhm.config.units import BYTES, COUNTS, read

Kind = Literal["memory", "bytes", "macs", "parameters"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def read_size(given: float | str, kind: Kind) -> int:
    """Read a size such as "128MB", "2MiB", "1.5GB", "300k" or a plain number; raises ValueError with a sentence."""
    units = _units(kind)
    shown = str(given)[:40]
    number, unit, factor = read(given, units)
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


def size_text(amount: int, kind: Kind) -> str:
    """Return the shortest text that `read_size` reads as this very amount."""
    texts = [f"{amount / size:.6g}{unit}" for unit, size in _units(kind).items() if amount >= size]
    exact = [text for text in texts if read_size(text, kind) == amount]
    return min(exact, key=len, default=str(amount))


@dataclass(frozen=True)
class Budget:
    """What a tier may take: amounts by kind, or as much as the version at a rank ratio takes ("1/8")."""

    limits: Mapping[Kind, int | Fraction]

    @property
    def name(self) -> str:
        """Return how the tier is called everywhere: memory:128MB, or memory:128MB,bytes:2MB."""
        return ",".join(
            f"{kind}:{self.limits[kind]}" if isinstance(self.limits[kind], Fraction) else f"{kind}:{self._text(kind)}"
            for kind in KINDS
            if kind in self.limits
        )

    def _text(self, kind: Kind) -> str:
        amount = self.limits[kind]
        assert isinstance(amount, int)
        return size_text(amount, kind)


def read_budget(given: object) -> Budget:
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
    return Budget({kind: _limit(given[kind], kind) for kind in KINDS if kind in given})


def _limit(given: object, kind: Kind) -> int | Fraction:
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
    return read_size(given, kind)
