"""No update may be longer than a multiple of how far clients usually move.

Updates pass one by one, in the order of their tasks. Only the first few of a round are held back until the median over
these is known: memory stays independent of the number of clients.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from fedhm.server.defence.agreement.standing import Seen
from fedhm.server.defence.moved import Moved, length
from fedhm.server.defence.norms import SETTLED, History


@dataclass
class Findings:
    """What the defence leaves in a round's record."""

    norms: dict[str, dict[str, dict[int, float]]]  # by part, tier and client: what was left of them
    clipped: list[dict[str, Any]]
    dropped: list[dict[str, Any]]
    agreement: dict[int, Seen] = field(default_factory=dict)  # by client
    disagreeing: int = 0  # updates that were dropped for it


def clip(arriving: Iterable[Moved], history: History, round_number: int, findings: Findings) -> Iterator[Moved]:
    """Yield the updates, those that are too long cut to the bound."""
    rest = iter(arriving)
    held, now = _held_back(rest)
    for each in chain(held, rest):
        yield _bounded(each, history, round_number, now, findings)


def _held_back(arriving: Iterator[Moved]) -> tuple[list[Moved], dict[str, list[float]]]:
    """Return the first updates, of as many clients as settle a median, and by part the norms of those clients."""
    held: list[Moved] = []
    norms: dict[str, dict[int, float]] = {}
    for each in arriving:
        held.append(each)
        for part, change in each.parts.items():
            note(norms.setdefault(part, {}), each.update.client, length(change))
        if all(len(of_part) >= SETTLED for of_part in norms.values()):
            break
    return held, {part: list(of_part.values()) for part, of_part in norms.items()}


def _bounded(
    each: Moved, history: History, round_number: int, now: dict[str, list[float]], findings: Findings
) -> Moved:
    lengths: dict[str, float] = {}
    client, tier = each.update.client, each.update.tier
    for part, change in each.parts.items():
        norm = length(change)
        bound = history.bound(part, tier, round_number, now.get(part, ()))
        if bound is not None and norm > bound:
            lengths[part] = bound
            entry = {"client": client, "tier": tier, "part": part, "norm": norm, "bound": bound}
            findings.clipped.append(entry)
        note(findings.norms.setdefault(part, {}).setdefault(tier, {}), client, lengths.get(part, norm))
    return each.cut(lengths)


def note(norms: dict[int, float], client: int, norm: float) -> None:
    norms[client] = max(norm, norms.get(client, 0.0))
