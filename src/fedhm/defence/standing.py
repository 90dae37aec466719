"""Who goes along with the others, in this round and in those before.

A client's agreement is the cosine between its change of a layer and the sum of the others' changes of it, each of
length 1, averaged over the layers. The classifier is left out: its rows follow from the labels that a client holds.
Clients with few labels may disagree for once, those that were made to harm do so in every round. So a client is out if

    Σ (agreement − median / 3) < −2 √ Σ spread²

over this round alone, or over its last five, with the others' median and spread of each. Of 960 updates of honest
clients, with all labels or few, none was (benchmarks/agreement.py).
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

SHARE = 1 / 3  # of the others' median agreement: so much is to be expected of everybody
SPREADS = 2.0  # so far below may it be
LEAST_SPREAD = 1 / 4  # of the median: among few clients some may be alike by chance
WINDOW = 5  # rounds of a client that are looked at together


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

    def add(self, agreement: Mapping[int, Seen]) -> None:
        """Add what was seen in one more round, by client."""
        for client, seen in agreement.items():
            self._of[client].append(seen)

    def out(self, client: int, seen: Seen) -> bool:
        """Tell whether a client disagrees, by this round alone or by the last ones together."""
        return any(
            sum(each.excess for each in rounds) < -SPREADS * math.hypot(*(each.spread for each in rounds))
            for rounds in ([seen], [*self._of[client], seen])
        )
