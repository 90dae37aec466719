"""No update may go far against where the others go.

A bound on lengths leaves an update that goes the others' way backwards four times as strong as any of them. Honest ones
hardly do that: also where clients hold one or two labels each, the part of a change that is against the mean of the
others was never seen longer than half of how far clients usually move. The first few updates of a round are held and
compared with each other, all later ones with these: memory stays independent of the number of clients.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from fedhm.defence.clip import Findings
from fedhm.defence.gram import Recovered, between, recovered
from fedhm.defence.moved import WEIGHTS, Layout, Moved, length
from fedhm.defence.norms import SETTLED, History

AGAINST = 0.6  # times how far clients usually move: so long may be what goes against the others
FEWEST = 4  # others, of which three honest ones tell the way


def bound_opposed(
    arriving: Iterable[Moved],
    history: History,
    round_number: int,
    findings: Findings,
    layout: Callable[[str], Layout],
    one_model: bool,
) -> Iterator[Moved]:
    """Yield the updates, in their order, those that go too far against the others cut to what may be."""

    def changed(each: Moved) -> Recovered:
        return recovered(each.parts[WEIGHTS], layout(each.update.network).factorized)

    def comparable(one: Moved, other: Moved) -> bool:
        return one_model or one.update.network == other.update.network

    rest = (each for each in arriving)
    held = list(islice(rest, SETTLED))
    known = [(each, changed(each)) for each in held if WEIGHTS in each.parts]
    lengths = [length(each.parts[WEIGHTS]) for each, _ in known]
    usual = history.level(WEIGHTS, None, round_number, lengths) or 0.0
    inner = {
        (i, j): between(change, known[j][1])
        for i, (each, change) in enumerate(known)
        for j in range(i + 1)
        if comparable(each, known[j][0])
    }
    places = {id(each): place for place, (each, _) in enumerate(known)}

    def judged(each: Moved) -> Moved:
        others = [
            place
            for place, (other, _) in enumerate(known)
            if comparable(each, other) and other.update.client != each.update.client
        ]
        if not usual or WEIGHTS not in each.parts or len(others) < FEWEST:
            return each
        place = places.get(id(each))
        if place is None:
            own = changed(each)
            products = [between(own, known[other][1]) for other in others]
        else:
            products = [inner[max(place, other), min(place, other)] for other in others]
        shares = [min(1.0, usual / lengths[other]) if lengths[other] else 0.0 for other in others]
        against = -_along(products, shares, others, inner)
        norm = length(each.parts[WEIGHTS])
        if not against > AGAINST * usual:  # NaN, of what is too long to be computed, is not
            return each
        left = norm * AGAINST * usual / against
        who = {"client": each.update.client, "tier": each.update.tier, "part": WEIGHTS}
        findings.clipped.append(who | {"norm": norm, "bound": left, "against": against})
        return each.cut({WEIGHTS: left})

    yield from map(judged, held)
    yield from map(judged, rest)


def _along(
    products: Sequence[float], shares: Sequence[float], others: Sequence[int], inner: dict[tuple[int, int], float]
) -> float:
    """Return how far a change goes along the sum of others, each by its share: its products with them are given."""
    squared = sum(
        a * b * inner[max(i, j), min(i, j)]
        for a, i in zip(shares, others, strict=True)
        for b, j in zip(shares, others, strict=True)
    )
    norm = math.sqrt(max(0.0, squared))
    return sum(a * p for a, p in zip(shares, products, strict=True)) / norm if norm else 0.0
