"""How far clients move, and how much they agree: the deltas of a round, and the history that defence judges by.

`UpdateDelta` splits an update's change into parts that are bounded separately: weights, averages that follow the data,
and outputs. `NormHistory` turns the norms of earlier rounds into bounds. `AgreementHistory` remembers which clients
disagreed with the others. Both follow from the records alone, so a resumed run has the same history.
"""

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from fedhm.lowrank.delta import FactorizedDelta, factorized_delta
from fedhm.lowrank.hybrid import plan_of
from fedhm.lowrank.plan import find_classifier
from fedhm.networks.exchange import exchanged_tensors
from fedhm.work.messages import Task, Update
from fedhm.work.work import work_of

LARGEST_NORM = 1e300  # JSON has no infinity
WEIGHTS, AVERAGES, OUTPUTS = "weights", "averages", "outputs"


@dataclass(frozen=True)
class Layout:
    """Which of a network's tensors are factors, and which are averages."""

    factorized: Set[str]  # layers that travel as factors
    averages: Set[str]  # running averages, and other buffers that follow the data
    output_layer: str | None = None  # the layer that gives the outputs


def layout_of(network: nn.Module, averages: Set[str]) -> Layout:
    """Return the layout of a network's tensors as they travel."""
    own = network.state_dict().keys()
    made = {name.removesuffix(".u") for name in exchanged_tensors(network) if name.endswith(".u") and name not in own}
    return Layout(plan_of(network).keys() | made, averages, find_classifier(network))


def finite_norm(delta: FactorizedDelta) -> float:
    """Return the norm of a change; if it overflows, the largest norm that a record can hold."""
    return delta.norm if delta.norm <= LARGEST_NORM else LARGEST_NORM  # no comparison with NaN is true


@dataclass(frozen=True)
class UpdateDelta:
    """An update, and the change of each of its parts from the tensors that were sent."""

    task: Task
    update: Update
    parts: Mapping[str, FactorizedDelta]

    def with_norms(self, norms: Mapping[str, float]) -> "UpdateDelta":
        """Return the update with some of its parts scaled to other norms, in the same direction.

        Without norms, the update is returned as it is, bit for bit.
        """
        if not norms:
            return self
        parts = {n: each.scaled_to(norms[n]) if n in norms else each for n, each in self.parts.items()}
        found = {name: tensor for each in parts.values() for name, tensor in each.returned.items()}
        update = replace(self.update, tensors={name: found[name] for name in self.update.tensors})
        return replace(self, update=update, parts=parts)


def update_delta(task: Task, update: Update, known: Layout) -> UpdateDelta:
    """Return the change of an update. It has no parts if its kind of work does not train."""
    work = work_of(task.kind)
    if not work.trains:
        return UpdateDelta(task, update, {})
    if not work.returns_network:  # its answer, such as logits, is bounded by the norms of other clients' answers
        nothing = {name: torch.zeros_like(tensor) for name, tensor in update.tensors.items()}
        return UpdateDelta(task, update, {OUTPUTS: factorized_delta(update.tensors, nothing, ())})
    sent = work.loaded(task)
    averages = {name: tensor for name, tensor in update.tensors.items() if name in known.averages}
    weights = {name: tensor for name, tensor in update.tensors.items() if name not in averages}
    parts = {WEIGHTS: factorized_delta(weights, sent, known.factorized)}
    if averages:
        parts[AVERAGES] = factorized_delta(averages, sent, ())
    return UpdateDelta(task, update, parts)


WINDOW = 5  # rounds whose norms make one median; in a single round, a tier has only two or three norms
MIN_NORMS = 3  # a median of three resists one false norm; with fewer norms, nobody is bounded
ENOUGH_NORMS = 8  # with this many norms there is no need to wait for more
MAX_OVER_ALL_TIERS = 2.0  # a tier's level is at most this multiple of the level of all tiers
MAX_GROWTH = 2.0  # this round's level is at most this multiple of the level of earlier rounds
BOUND_FACTOR = 4.0  # an update's norm is at most this multiple of the level

# The norms of one round's updates, by part of the update, tier and client. A client with several tasks has one vote:
# the largest of its norms.
Norms = Mapping[str, Mapping[str, Mapping[int, float]]]


class NormHistory:
    """The norms of earlier rounds, and the bound on a client's norm that follows from them.

    A bound that follows from the others' norms needs no setting. Four facts shape it:

    - Norms of weights are divided by the round's learning rate, to which they are proportional. Otherwise, a bound from
      before the rate was lowered would allow ten times too much afterwards.
    - Norms shrink as clients converge, but not all at once. Late in a run, an honest client may move six times as far
      as the median of the last rounds. So the level is the largest median so far. This is still far below the limit of
      a single update, `train.max_change`.
    - Norms may also grow, like those of adapters, which start at zero. So this round's median counts if it is larger,
      but at most twice the level: in a single round, more than half of the clients may be hostile.
    - A median resists a minority, but hostile clients may be the majority of a small tier. So a tier's level is bounded
      by the level of all tiers together, and norms enter the history after they were clipped.
    """

    def __init__(self, learning_rate: Callable[[int], float]) -> None:
        self._learning_rate = learning_rate  # by round
        self._parts: defaultdict[str, _PartNorms] = defaultdict(_PartNorms)

    def add(self, round_number: int, norms: Norms) -> None:
        """Add the norms of one more round."""
        for part, by_tier in norms.items():
            unit = self._unit(part, round_number)
            self._parts[part].add({tier: [norm / unit for norm in each.values()] for tier, each in by_tier.items()})

    def level(self, part: str, tier: str | None, round_number: int, now: Iterable[float] = ()) -> float | None:
        """Return how far clients usually move in a round; None: too few norms are known.

        tier  None: clients of all tiers
        now   norms of this round; while earlier rounds have too few norms, only these count
        """
        unit = self._unit(part, round_number)
        return self._parts[part].level(tier, [norm / unit for norm in now]) * unit or None

    def bound(self, part: str, tier: str, round_number: int, now: Iterable[float] = ()) -> float | None:
        """Return the largest allowed norm of a part of an update; None: too few norms are known."""
        level = self.level(part, tier, round_number, now)
        return None if level is None else BOUND_FACTOR * level

    def _unit(self, part: str, round_number: int) -> float:
        return self._learning_rate(round_number) if part == WEIGHTS else 1.0


class _PartNorms:
    """The norms of one part of the updates, divided by its unit."""

    def __init__(self) -> None:
        self._recent: deque[dict[str, list[float]]] = deque(maxlen=WINDOW)
        self._levels: dict[str | None, float] = {}  # by tier; None: all tiers

    @property
    def settled(self) -> bool:
        return None in self._levels

    def add(self, norms: dict[str, list[float]]) -> None:
        self._recent.append(norms)
        for tier in (None, *norms):
            if len(known := self._known(tier)) >= ENOUGH_NORMS:
                self._levels[tier] = max(self._levels.get(tier, 0.0), statistics.median(known))

    def level(self, tier: str | None, now: Sequence[float]) -> float:
        """Return the level of a tier, or of all tiers; 0: too few norms are known."""
        if self.settled:
            everybody = self._levels[None]
            before = min(self._levels.get(tier, everybody), MAX_OVER_ALL_TIERS * everybody)
            return (
                max(before, min(statistics.median_low(now), MAX_GROWTH * before)) if len(now) >= MIN_NORMS else before
            )
        known = [*self._known(None), *now]
        return statistics.median(known) if len(known) >= MIN_NORMS else 0.0

    def _known(self, tier: str | None) -> list[float]:
        """Return the norms of the last rounds, of a tier or of all tiers."""
        rounds = ([norms.get(tier, [])] if tier is not None else norms.values() for norms in self._recent)
        return [norm for each in rounds for of_tier in each for norm in of_tier]


EXPECTED_SHARE = 1 / 2  # a client whose update is too long is expected to reach this share of the median agreement
MIN_SPREAD = 1 / 4  # of the median: among few clients, some may be alike by chance
ROUND_SPREADS = 3.0  # how many spreads below the expectation a client may be in one round
LASTING_SPREADS = 2.5  # how many spreads below the expectation a client may be over its last rounds
AGREEMENT_WINDOW = 8  # rounds of a client that are judged together


class AgreementScore(NamedTuple):
    """How much a client agreed with the others in a round. Records hold these four numbers."""

    agreement: float
    median: float  # of the others
    spread: float
    expected: float = 0.0  # the least that is expected: 0, or a share of the median if the update is too long

    @property
    def excess(self) -> float:
        """Return by how much the agreement is above the expectation."""
        return self.agreement - self.expected


class AgreementHistory:
    """How much clients agreed with the others in earlier rounds, and which clients disagree.

    The changes of two clients have a cosine in every layer; the mean of these cosines is their similarity. The
    classifier is left out, since its rows follow from the labels that a client holds. A client's agreement is the 60 %
    quantile of its similarities with all others. The similarity with their sum would not do: in the sum, a few hostile
    clients that are alike count for more than many honest clients that are not.

    Clients with few labels may disagree once. Clients that mean harm disagree in every round. So a client disagrees if,
    with the others' median and spread,

        agreement − expected < −3 spread                 in this round, or
        Σ (agreement − expected) < −2.5 √ Σ spread²      over its last eight rounds, or fewer, but at least two

    An honest client with very few samples goes its own way: its agreement is about 0, and that is enough. A client
    whose update is too long has trained much, or means harm. Of such a client, half of the median is expected.

    A client that disagreed in earlier rounds is no reference for others until it agrees again. Clients that have
    converged have no common direction: their median is less than two spreads, or a quarter of its largest value so far.
    Such rounds do not count, and a client that disagreed before them stays out.
    """

    def __init__(self) -> None:
        self._scores: defaultdict[int, deque[AgreementScore]] = defaultdict(lambda: deque(maxlen=AGREEMENT_WINDOW - 1))
        self.largest_median = 0.0

    def add(self, scores: Mapping[int, AgreementScore]) -> None:
        """Add the scores of one more round, by client."""
        for client, score in scores.items():
            self._scores[client].append(score)
            self.largest_median = max(self.largest_median, score.median)

    def margin(self, client: int, score: AgreementScore) -> float:
        """Return how many spreads a client is above the limit, in this round or over its last rounds."""
        in_round = score.excess / score.spread + ROUND_SPREADS
        return min(in_round, _lasting_margin([*self._scores[client], score]))

    def disagrees(self, client: int, score: AgreementScore) -> bool:
        """Tell whether a client disagrees, in this round alone or over its last rounds together."""
        return self.margin(client, score) < 0

    def disagreed_before(self, client: int) -> bool:
        """Tell whether a client disagreed over its last rounds, this one not among them."""
        return _lasting_margin(self._scores[client]) < 0


def _lasting_margin(scores: Collection[AgreementScore]) -> float:
    """Return how many spreads a client is above the limit over its last rounds; below 0, it disagrees."""
    if len(scores) < 2:
        return math.inf
    return sum(score.excess for score in scores) / math.hypot(*(score.spread for score in scores)) + LASTING_SPREADS
