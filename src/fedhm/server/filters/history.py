"""What a client changed, in the parts that are bounded apart: weights, averages that follow the data, outputs."""

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

LARGEST = 1e300  # of a norm: JSON has no infinity
WEIGHTS, AVERAGES, OUTPUTS = "weights", "averages", "outputs"


@dataclass(frozen=True)
class Layout:
    """What the tensors of a network are."""

    factorized: Set[str]  # layers that travel as factors
    averages: Set[str]  # running averages, and other buffers that follow the data
    output_layer: str | None = None  # the layer that gives the outputs


def layout_of(network: nn.Module, averages: Set[str]) -> Layout:
    """Return what a network's tensors are, as they travel."""
    own = network.state_dict().keys()
    made = {name.removesuffix(".u") for name in exchanged_tensors(network) if name.endswith(".u") and name not in own}
    return Layout(plan_of(network).keys() | made, averages, find_classifier(network))


def finite_norm(delta: FactorizedDelta) -> float:
    """Return the norm of a change, or the largest that a record can have where it is too long to be computed."""
    return delta.norm if delta.norm <= LARGEST else LARGEST  # NaN is not


@dataclass(frozen=True)
class UpdateDelta:
    """An update, and how far each part of it is from what was sent."""

    task: Task
    update: Update
    parts: Mapping[str, FactorizedDelta]

    def cut(self, lengths: Mapping[str, float]) -> "UpdateDelta":
        """Return the update with some of its parts at other lengths, on the straight way from what was sent.

        The very same one, to the last bit, if no part is to have another length.
        """
        if not lengths:
            return self
        parts = {n: each.scaled_to(lengths[n]) if n in lengths else each for n, each in self.parts.items()}
        found = {name: tensor for each in parts.values() for name, tensor in each.returned.items()}
        update = replace(self.update, tensors={name: found[name] for name in self.update.tensors})
        return replace(self, update=update, parts=parts)


def update_delta(task: Task, update: Update, known: Layout) -> UpdateDelta:
    """Return what an update changed; nothing where its kind of work does not train."""
    work = work_of(task.kind)
    if not work.trains:
        return UpdateDelta(task, update, {})
    if not work.returns_network:  # its own answer, such as logits, which may be as long as those of others
        nothing = {name: torch.zeros_like(tensor) for name, tensor in update.tensors.items()}
        return UpdateDelta(task, update, {OUTPUTS: factorized_delta(update.tensors, nothing, ())})
    sent = work.loaded(task)
    averages = {name: tensor for name, tensor in update.tensors.items() if name in known.averages}
    weights = {name: tensor for name, tensor in update.tensors.items() if name not in averages}
    parts = {WEIGHTS: factorized_delta(weights, sent, known.factorized)}
    if averages:
        parts[AVERAGES] = factorized_delta(averages, sent, ())
    return UpdateDelta(task, update, parts)


# How far clients moved in the rounds before, and how far one may move by that.
#
# A bound that follows from the others' norms needs no setting. Four facts shape it:
#
# - Norms of weights are divided by the round's learning rate, of which they are multiples: a bound from before it was
#   lowered would allow ten times too much afterwards.
# - Norms shrink as clients converge, and not all at once: late in a run an honest client may move six times as far as
#   the median of the last rounds. So the level is the largest median so far, which is still far below what a
#   single update may do by `train.max_change`.
# - Norms may also grow, as those of adapters do that begin at zero. So this round's median counts where it is larger,
#   but no more than twice the level: of a single round's clients more than half may be hostile.
# - A median resists a minority, but in a tier of few clients the hostile may be most. So a tier's level is bounded by
#   that of all tiers together, and what counts of a norm is what the bound left of it.

WINDOW = 5  # rounds whose norms make one median: of a single round, a tier has two or three
MIN_NORMS = 3  # norms, of which a median resists one that lies: with fewer, nobody is bounded
ENOUGH_NORMS = 8  # norms, from which on there is no need to wait for more
MAX_OVER_ALL_TIERS = 2.0  # times the level of all tiers: a tier's own is not more
MAX_GROWTH = 2.0  # times the level of the rounds before: that of this round is not more
BOUND_FACTOR = 4.0  # times the level: an update may be so long

# Of one round's updates, by part of the update, tier and client: of a client with several tasks the largest, since all
# its tasks together are to have one vote
Norms = Mapping[str, Mapping[str, Mapping[int, float]]]


class NormHistory:
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
        return None if level is None else BOUND_FACTOR * level

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
            if len(known := self._known(tier)) >= ENOUGH_NORMS:
                self._levels[tier] = max(self._levels.get(tier, 0.0), statistics.median(known))

    def level(self, tier: str | None, now: Sequence[float]) -> float:
        """Return the level of a tier, or of all; 0: too little is known."""
        if self.settled:
            everybody = self._levels[None]
            before = min(self._levels.get(tier, everybody), MAX_OVER_ALL_TIERS * everybody)
            return (
                max(before, min(statistics.median_low(now), MAX_GROWTH * before)) if len(now) >= MIN_NORMS else before
            )
        known = [*self._known(None), *now]
        return statistics.median(known) if len(known) >= MIN_NORMS else 0.0

    def _known(self, tier: str | None) -> list[float]:
        """Return the norms of the last rounds: of a tier, or of all."""
        rounds = ([norms.get(tier, [])] if tier is not None else norms.values() for norms in self._recent)
        return [norm for each in rounds for of_tier in each for norm in of_tier]


# Who goes along with the others, in this round and in those before.
#
# Two clients' changes have a cosine in every layer, of which the mean is taken. The classifier is left out: its rows
# follow from the labels that a client holds. A client's agreement is the 60 % quantile of its means with all others:
# not with their sum, in which a few hostile ones that are alike count for more than many honest ones that are not.
# Clients with few labels may disagree for once, those that were made to harm do so in every round. So a client is out
# if, with the others' median and spread,
#
#     agreement − median / 2 < −4 max(spread, median / 4)    in this round, or
#     Σ (agreement − median / 2) < −2.5 √ Σ spread²          over its last eight, or fewer, but not one alone
#
# Who is out by the rounds before does not tell the way until it agrees again. Clients that have converged go no
# common way, with a median of less than two spreads or an eighth of what it was once: such rounds do not count, and
# who was out stays out.

EXPECTED_SHARE = 1 / 2  # of the others' median agreement: so much is to be expected of everybody
MIN_SPREAD = 1 / 10  # of the median: among few clients some may be alike by chance
ROUND_SPREADS, MIN_ROUND_SPREAD = (
    4.0,
    1 / 4,
)  # spreads, and what is the least of them then: so far below may it be in a round
LASTING_SPREADS = 2.5  # spreads: so far below may it be over its last rounds
AGREEMENT_WINDOW = 8  # rounds of a client that are looked at together


class AgreementScore(NamedTuple):
    """How a client went along with the others in a round."""

    agreement: float
    median: float  # of the others
    spread: float

    @property
    def excess(self) -> float:
        return self.agreement - EXPECTED_SHARE * self.median


class AgreementHistory:
    """How clients agreed in the rounds before, as their records have it."""

    def __init__(self) -> None:
        self._of: defaultdict[int, deque[AgreementScore]] = defaultdict(lambda: deque(maxlen=AGREEMENT_WINDOW - 1))
        self.most = 0.0  # the largest median

    def add(self, agreement: Mapping[int, AgreementScore]) -> None:
        """Add what was seen in one more round, by client."""
        for client, seen in agreement.items():
            self._of[client].append(seen)
            self.most = max(self.most, seen.median)

    def margin(self, client: int, seen: AgreementScore) -> float:
        """Return by how many spreads a client is above where it disagrees, in this round or over the last ones."""
        once = seen.excess / max(seen.spread, MIN_ROUND_SPREAD * seen.median) + ROUND_SPREADS
        return min(once, _lasting([*self._of[client], seen]))

    def disagrees(self, client: int, seen: AgreementScore) -> bool:
        """Tell whether a client disagrees, by this round alone or by the last ones together."""
        return self.margin(client, seen) < 0

    def disagreed_before(self, client: int) -> bool:
        """Tell whether a client disagrees by the rounds before."""
        return _lasting(self._of[client]) < 0


def _lasting(rounds: Collection[AgreementScore]) -> float:
    if len(rounds) < 2:
        return math.inf
    return sum(seen.excess for seen in rounds) / math.hypot(*(seen.spread for seen in rounds)) + LASTING_SPREADS
