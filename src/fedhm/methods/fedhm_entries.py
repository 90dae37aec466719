"""The names of FedHM in comparisons: as it is by default, as in the paper, and with one size for all clients."""

from collections.abc import Sequence
from functools import partial

from fedhm.config.section import tier_name
from fedhm.config.sections.method_config import Family, NamedEntry, Settings, Sizes, replace_largest
from fedhm.methods.tier_budgets import budgets_of

PAPER: Settings = {"aggregate": "models", "start": "whole"}


def _with_largest_replaced(count: int, sizes: Sizes) -> Settings:
    given = sizes.fedhm
    levels = given["tiers"] if budgets_of(given["tiers"]) else sizes.ratios
    tiers = replace_largest(levels, count, f"fedhm-v{count + 1}")
    return {**given, "tiers": tiers, "replan": given["replan"] if budgets_of(tiers) else []}


def _low_rank(sizes: Sizes, ratio: float | str) -> Settings:
    """Return the settings with which FedHM trains one tier on all clients."""
    return {"name": "fedhm", "tiers": [ratio], "keep": sizes.keep, **PAPER}


def _pufferfish(sizes: Sizes) -> Settings:
    return {**_low_rank(sizes, min(sizes.ratios)), "form": "pufferfish", "warmup": max(1, sizes.rounds // 10)}


ENTRIES: Sequence[NamedEntry | Family] = [
    NamedEntry("fedhm", lambda sizes: sizes.fedhm),
    NamedEntry("fedhm-paper", lambda sizes: {**sizes.fedhm, **PAPER}),
    NamedEntry("fedhm-updates", lambda sizes: {**sizes.fedhm, **PAPER, "aggregate": "updates"}),
    *(NamedEntry(f"fedhm-v{count + 1}", partial(_with_largest_replaced, count)) for count in (1, 2)),
    NamedEntry("pufferfish", _pufferfish),
    Family("lowrank", lambda sizes: sorted(set(sizes.ratios), reverse=True), _low_rank, tier_name),
]
