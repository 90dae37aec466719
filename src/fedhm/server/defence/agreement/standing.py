"""Who goes along with the others, in this round and in those before.

Two clients' changes have a cosine in every layer, of which the mean is taken. The classifier is left out: its rows
follow from the labels that a client holds. A client's agreement is the 60 % quantile of its means with all others: not
with their sum, in which a few hostile ones that are alike count for more than many honest ones that are not. Clients
with few labels may disagree for once, those that were made to harm do so in every round. So a client is out if, with
the others' median and spread,

    agreement − median / 2 < −4 max(spread, median / 4)    in this round, or
    Σ (agreement − median / 2) < −2.5 √ Σ spread²          over its last eight, or fewer, but not one alone

Who is out by the rounds before does not tell the way until it agrees again. Clients that have converged go no common
way, with a median of less than two spreads or an eighth of what it was once: such rounds do not count, and who was out
stays out.
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

SHARE = 1 / 2  # of the others' median agreement: so much is to be expected of everybody
LEAST_SPREAD = 1 / 10  # of the median: among few clients some may be alike by chance
ONCE, LEAST_ONCE = 4.0, 1 / 4  # spreads, and what is the least of them then: so far below may it be in a round
LASTING = 2.5  # spreads: so far below may it be over its last rounds
WINDOW = 8  # rounds of a client that are looked at together


class Seen(NamedTuple):
    """How a client went along with the others in a round."""

    agreement: float
    median: float  # of the others
    spread: float

    @property
    def excess(self) -> float:
        return self.agreement - SHARE * self.median


class Standing:
    """How clients agreed in the rounds before, as their records have it."""

    def __init__(self) -> None:
        self._of: defaultdict[int, deque[Seen]] = defaultdict(lambda: deque(maxlen=WINDOW - 1))
        self.most = 0.0  # the largest median

    def add(self, agreement: Mapping[int, Seen]) -> None:
        """Add what was seen in one more round, by client."""
        for client, seen in agreement.items():
            self._of[client].append(seen)
            self.most = max(self.most, seen.median)

    def margin(self, client: int, seen: Seen) -> float:
        """Return by how many spreads a client is above where it disagrees, in this round or over the last ones."""
        once = seen.excess / max(seen.spread, LEAST_ONCE * seen.median) + ONCE
        return min(once, _lasting([*self._of[client], seen]))

    def out(self, client: int, seen: Seen) -> bool:
        """Tell whether a client disagrees, by this round alone or by the last ones together."""
        return self.margin(client, seen) < 0

    def was_out(self, client: int) -> bool:
        """Tell whether a client disagrees by the rounds before."""
        return _lasting(self._of[client]) < 0


def _lasting(rounds: Collection[Seen]) -> float:
    if len(rounds) < 2:
        return math.inf
    return sum(seen.excess for seen in rounds) / math.hypot(*(seen.spread for seen in rounds)) + LASTING
