"""A section of the settings, and the kinds of values that several sections have."""

import math
from fractions import Fraction
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from fedhm.config.units import parse_budget, parse_share, share_name


def is_empty(value: object) -> bool:
    """Tell whether a setting is left out of a config: it came later, and runs without it must stay the same runs."""
    return not value


class Section(BaseModel):
    """A section of the settings. Unknown keys are refused, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")


def as_ratio(value: object) -> object:
    """Read "1/8" as a number; any other value is left to pydantic."""
    if isinstance(value, str):
        try:
            # not for texts without a slash: Fraction("1e999999999") would take forever
            return float(Fraction(value)) if "/" in value else value
        except (ValueError, ZeroDivisionError, OverflowError):
            return value
    return value


def _distinct(ratios: tuple[float, ...]) -> tuple[float, ...]:
    if len({f"{ratio:g}" for ratio in ratios}) != len(set(ratios)):
        raise ValueError("two tiers are so close that they have the same name: make them differ more")
    return ratios


Ratio = Annotated[float, BeforeValidator(as_ratio), Field(gt=0, le=1)]
Positive = Annotated[int, Field(ge=1, le=10**9)]  # no count here is larger, and torch's counts may not be
Ratios = Annotated[tuple[Ratio, ...], Field(min_length=1), AfterValidator(_distinct)]


def _as_tier(value: object) -> object:
    """Read a budget or a share as its name, and a ratio as a number."""
    if isinstance(value, str) and value.strip().endswith("%"):
        share = parse_share(value)
        return 1.0 if share == 1 else share_name(share)
    if isinstance(value, dict) or (isinstance(value, str) and ":" in value):
        return parse_budget(value).name
    return as_ratio(value)


def _distinct_tiers(tiers: tuple[float | str, ...]) -> tuple[float | str, ...]:
    _distinct(tuple(tier for tier in tiers if not isinstance(tier, str)))
    return tiers


# a rank ratio, or by its name a budget or a share of the parameters
Tier = Annotated[Annotated[float, Field(gt=0, le=1)] | Annotated[str, Field(pattern=":|%")], BeforeValidator(_as_tier)]
Tiers = Annotated[tuple[Tier, ...], Field(min_length=1), AfterValidator(_distinct_tiers)]


def tier_name(ratio: float | str) -> str:
    """Return the name of a tier everywhere: full, 1/2, 1/8, or the plain number; budgets and shares are their names."""
    if isinstance(ratio, str):
        return ratio
    if ratio == 1:
        return "full"
    fraction = Fraction(ratio).limit_denominator(64)
    return str(fraction) if math.isclose(float(fraction), ratio, rel_tol=1e-9) else f"{ratio:g}"


def width_name(width: float) -> str:
    """Return the name of a width everywhere: full, w0.62."""
    return "full" if width == 1 else f"w{width:g}"
