"""How far clients moved in the rounds before, and how far one may move by that.

A bound that follows from the others' norms needs no setting. Four facts shape it:

- Norms of weights are divided by the round's learning rate, of which they are multiples: a bound from before it was
  lowered would allow ten times too much afterwards.
- Norms shrink as clients converge, and not all at once: late in a run an honest client may move six times as far as the
  median of the last rounds. So the level is the largest median so far, which is still far below what a single update
  may do by `train.max_change`.
- Norms may also grow, as those of adapters do that begin at zero. So this round's median counts where it is larger, but
  no more than twice the level: of a single round's clients more than half may be hostile.
- A median resists a minority, but in a tier of few clients the hostile may be most. So a tier's level is bounded by
  that of all tiers together, and what counts of a norm is what the bound left of it.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from fedhm.server.defence.moved import WEIGHTS

WINDOW = 5  # rounds whose norms make one median: of a single round, a tier has two or three
ENOUGH = 3  # norms, of which a median resists one that lies: with fewer, nobody is bounded
SETTLED = 8  # norms, from which on there is no need to wait for more
ABOVE_ALL = 2.0  # times the level of all tiers: a tier's own is not more
GROWTH = 2.0  # times the level of the rounds before: that of this round is not more
MULTIPLE = 4.0  # times the level: an update may be so long

# Of one round's updates, by part of the update, tier and client: of a client with several tasks the largest, since all
# its tasks together are to have one vote
Norms = Mapping[str, Mapping[str, Mapping[int, float]]]


class History:
    """The norms of the rounds before, as their records have them."""

    def __init__(self, learning_rate: Callable[[int], float]) -> None:
        self._learning_rate = learning_rate  # of a round
        self._of: defaultdict[str, _OfPart] = defaultdict(_OfPart)

    def add(self, round_number: int, norms: Norms) -> None:
        """Add the norms of one more round."""
        for part, by_tier in norms.items():
            unit = self._unit(part, round_number)
            self._of[part].add({tier: [norm / unit for norm in each.values()] for tier, each in by_tier.items()})

    def level(self, part: str, tier: str | None, round_number: int, now: Iterable[float] = ()) -> float | None:
        """Return how far clients of a tier, or of all, move in a round; None: too little is known to say.

        now  norms of this round, which alone count while there are too few of the rounds before
        """
        unit = self._unit(part, round_number)
        return self._of[part].level(tier, [norm / unit for norm in now]) * unit or None

    def bound(self, part: str, tier: str, round_number: int, now: Iterable[float] = ()) -> float | None:
        """Return how long a part of an update may be; None: too little is known to say."""
        level = self.level(part, tier, round_number, now)
        return None if level is None else MULTIPLE * level

    def _unit(self, part: str, round_number: int) -> float:
        return self._learning_rate(round_number) if part == WEIGHTS else 1.0


class _OfPart:
    """The norms of one part of the updates, in its unit."""

    def __init__(self) -> None:
        self._recent: deque[dict[str, list[float]]] = deque(maxlen=WINDOW)
        self._levels: dict[str | None, float] = {}  # by tier; None: of all tiers

    @property
    def settled(self) -> bool:
        return None in self._levels

    def add(self, norms: dict[str, list[float]]) -> None:
        self._recent.append(norms)
        for tier in (None, *norms):
            if len(known := self._known(tier)) >= SETTLED:
                self._levels[tier] = max(self._levels.get(tier, 0.0), statistics.median(known))

    def level(self, tier: str | None, now: Sequence[float]) -> float:
        """Return the level of a tier, or of all; 0: too little is known."""
        if self.settled:
            everybody = self._levels[None]
            before = min(self._levels.get(tier, everybody), ABOVE_ALL * everybody)
            return max(before, min(statistics.median_low(now), GROWTH * before)) if len(now) >= ENOUGH else before
        known = [*self._known(None), *now]
        return statistics.median(known) if len(known) >= ENOUGH else 0.0

    def _known(self, tier: str | None) -> list[float]:
        """Return the norms of the last rounds: of a tier, or of all."""
        rounds = ([norms.get(tier, [])] if tier is not None else norms.values() for norms in self._recent)
        return [norm for each in rounds for of_tier in each for norm in of_tier]
