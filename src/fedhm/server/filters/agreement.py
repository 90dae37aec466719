"""Comparison of a round's updates with each other: drop clients that disagree, centered clipping, multi-Krum.

All rules need only inner products ⟨Dᵢ, Dⱼ⟩ of recovered deltas, also between networks of different ranks that are
versions of one model. These are computed in factor form, and nothing is recovered. A factorized layer's delta is

    U V − U₀ V₀ = (U, −U₀)(V; V₀) = L R

a product of factors of twice the rank. The inner product of two products takes only small matrices. With a dense
delta D it is ⟨Lᵀ D, R⟩.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fedhm.lowrank.delta import FactorizedDelta, inner_product
from fedhm.lowrank.layers import dense_weight_name
from fedhm.lowrank.svd import Form, to_matrix_factors, unroll
from fedhm.networks.exchange import is_averageable, upcast_half
from fedhm.networks.spec import NetworkSpec
from fedhm.server.filters.clip import DefenceLog
from fedhm.server.filters.history import (
    EXPECTED_SHARE,
    MIN_SPREAD,
    WEIGHTS,
    AgreementHistory,
    AgreementScore,
    Layout,
    NormHistory,
    UpdateDelta,
    finite_norm,
)

# Inner products of recovered deltas

RecoveredDelta = Mapping[str, Tensor | tuple[Tensor, Tensor]]  # by name of the weight: dense, or left and right factor


def recovered_delta(change: FactorizedDelta, factorized: Collection[str]) -> RecoveredDelta:
    """Return a delta by the names of the full model's tensors; factorized layers stay factors."""
    found: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
    pairs = {f"{layer}.{part}" for layer in factorized for part in ("u", "v")}
    for name, tensor in change.returned.items():
        if name not in pairs and is_averageable(tensor):
            difference = upcast_half(tensor) - upcast_half(change.sent[name])
            found[name] = torch.view_as_real(difference) if difference.is_complex() else difference
    for layer in sorted(factorized):  # sums need one order
        u, v = f"{layer}.u", f"{layer}.v"
        left, right = to_matrix_factors(change.returned[u], change.returned[v])
        left_sent, right_sent = to_matrix_factors(change.sent[u], change.sent[v])
        found[dense_weight_name(layer)] = (
            torch.cat([left, -left_sent], 1).double(),
            torch.cat([right, right_sent], 0).double(),
        )
    return found


def gram_matrix(deltas: Sequence[RecoveredDelta]) -> Tensor:
    """Return the inner products of all pairs, (n, n)."""
    found = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    for row, one in enumerate(deltas):
        for column, other in enumerate(deltas[: row + 1]):
            found[row, column] = found[column, row] = sum(_weight_product(one[name], other[name]) for name in one)
    return found


def layer_inner_products(one: RecoveredDelta, other: RecoveredDelta) -> dict[str, float]:
    """Return the inner products of two deltas, layer by layer."""
    found: dict[str, float] = {}
    for name in one:
        layer = name.rpartition(".")[0]
        found[layer] = found.get(layer, 0.0) + _weight_product(one[name], other[name])
    return found


def _weight_product(one: Tensor | tuple[Tensor, Tensor], other: Tensor | tuple[Tensor, Tensor]) -> float:
    if isinstance(one, Tensor):
        if isinstance(other, Tensor):
            return torch.dot(one.flatten(), other.flatten().to(one.dtype)).item()
        one, other = other, one
    if isinstance(other, Tensor):
        left, right = one
        form: Form = "pufferfish" if right.shape[1] == len(other) else "spatial"
        return ((left.T @ unroll(other, form).to(left.dtype)) * right).sum().item()
    return inner_product(one, other)


# Agreement with the other clients

MIN_PEERS = 2  # fewer other clients do not show which direction is against theirs
MIN_PEERS_TO_JUDGE = 4  # three honest clients among four show which client disagrees with them
STD_PER_MAD = 1.4826  # standard deviations in a median distance from the median, of a normal distribution
AGREEMENT_QUANTILE = 0.6  # of the similarities with others
CLEAR_SPREADS = 2.0  # with a common direction, the median agreement is at least this many spreads
CLEAR_SHARE = 1 / 4  # and at least this share of the largest median so far


class PeerGroup:
    """The first updates of a round that can be compared with each other. Every update is judged by them.

    The reference are the members that agree: clients that disagree with the rest, or did in earlier rounds, are no
    members of it. `AgreementHistory` has the formulas.

    output_layer  the classifier: agreement is measured in all other layers, if there are any
    """

    def __init__(
        self,
        clients: Sequence[int],
        deltas: Sequence[RecoveredDelta],
        output_layer: str | None,
        history: AgreementHistory,
    ) -> None:
        self._clients, self._deltas, self._output_layer, self._history = clients, deltas, output_layer, history
        products = torch.stack([self._products(delta) for delta in deltas], 1)  # (1 + layers, n, n)
        self._norms = products.diagonal(dim1=1, dim2=2).clamp(min=0.0).sqrt()
        self._cosines = _cosines(products, self._norms[:, :, None] * self._norms[:, None])
        trusted = [place for place, client in enumerate(clients) if not history.disagreed_before(client)]
        self._reference = trusted if len(trusted) > MIN_PEERS_TO_JUDGE else list(range(len(clients)))
        for _ in clients:
            scores = self._compare_members()
            if self.median <= 0:
                break
            left = [place for place, score in enumerate(scores) if not history.disagrees(clients[place], score)]
            if left == self._reference or len(left) <= MIN_PEERS_TO_JUDGE:
                break
            self._reference = left

    @property
    def has_direction(self) -> bool:
        """Tell whether clients have a common direction. Clients that have converged do not: nobody can be judged."""
        return self.median > max(0.0, CLEAR_SPREADS * self._deviation, CLEAR_SHARE * self._history.largest_median)

    def peers(self, client: int) -> int:
        """Return how many other clients' deltas are in the reference."""
        return sum(self._clients[place] != client for place in self._reference)

    def compare(self, client: int, delta: RecoveredDelta) -> tuple[float, float]:
        """Return a delta's agreement with the others, and its cosine with the sum of their directions."""
        own = self._stacked(layer_inner_products(delta, delta)).clamp(min=0.0).sqrt()
        return self._agreement(client, _cosines(self._products(delta), own[:, None] * self._norms))

    def score(self, agreement: float, *, too_long: bool = False) -> AgreementScore:
        """Return an agreement together with the median and spread of the reference, and what is expected."""
        return AgreementScore(agreement, self.median, self._spread, EXPECTED_SHARE * self.median if too_long else 0.0)

    def _compare_members(self) -> list[AgreementScore]:
        """Compare all members with the reference, and set the median and spread of the reference."""
        found = [self._agreement(client, self._cosines[:, place]) for place, client in enumerate(self._clients)]
        agreements, cosines = ([found[place][part] for place in self._reference] for part in (0, 1))
        self.median, self.median_cosine = statistics.median(agreements), statistics.median(cosines)
        self._deviation = STD_PER_MAD * statistics.median(abs(each - self.median) for each in agreements)
        self._spread = max(self._deviation, MIN_SPREAD * self.median)
        return [self.score(agreement) for agreement, _ in found]

    def _agreement(self, client: int, cosines: Tensor) -> tuple[float, float]:
        """Return the agreement, and the cosine with the sum of the others' deltas, each scaled to norm 1.

        cosines  with each member, (1 + layers, n)
        """
        others = [place for place in self._reference if self._clients[place] != client]
        if not others:
            return 0.0, 0.0
        agreement = cosines[1:, others].mean(0).quantile(AGREEMENT_QUANTILE)
        norm = self._cosines[0][others][:, others].sum().clamp(min=0.0).sqrt()
        return agreement.item(), _cosines(cosines[0, others].sum(), norm).item()

    def _products(self, delta: RecoveredDelta) -> Tensor:
        return torch.stack([self._stacked(layer_inner_products(delta, other)) for other in self._deltas], 1)

    def _stacked(self, products: dict[str, float]) -> Tensor:
        """Return the sum over all layers, then the layers that agreement is measured in, (1 + layers,).

        Layers have one order for all networks.
        """
        ordered = dict(sorted(products.items()))
        layers = [value for layer, value in ordered.items() if layer != self._output_layer] or [*ordered.values()]
        return torch.tensor([sum(ordered.values()), *layers], dtype=torch.float64)


def _cosines(products: Tensor, norms: Tensor) -> Tensor:
    """Return cosines from inner products: 0 for a delta of norm 0, −1 where the numbers overflow."""
    return torch.where(norms > 0, products / norms, 0.0).nan_to_num(nan=-1.0, posinf=-1.0, neginf=-1.0)


REFERENCE_SIZE = 12  # updates that are held and compared, of all networks together
DISAGREED = "it disagreed with the others in its last rounds"
MAX_AGAINST = 0.6  # of the usual norm: limit on the part of an update that goes against the others
FAR_TOO_LONG = 3.0  # times the bound on its norm: no honest client moves so far
MAX_AGAINST_UNCLEAR = 0.9  # the same, if clients have no common direction


def drop_disagreeing(
    arriving: Iterable[UpdateDelta],
    norms: NormHistory,
    round_number: int,
    log: DefenceLog,
    layout: Callable[[NetworkSpec], Layout],
    one_model: bool,
    history: AgreementHistory,
) -> Iterator[UpdateDelta]:
    """Yield the updates to merge, in their order, and log why the others are dropped.

    A bound on norms is not enough. An update against the others' direction may still be four times as strong as any of
    them, and FedHM's upper bands are averaged over two or three clients, among which a hostile client is no minority.
    But all clients train the same layers, so they can be compared. An update is dropped if

    - its client disagrees with the others, in this round or in its last rounds, or did before and cannot be compared in
      this round; or
    - its part against the others is longer than 0.6 × the usual norm. That of honest clients was never longer than half
      the usual norm if clients have a common direction. Without one, as for clients with few labels in a first round,
      it was up to 0.72 ×, and 0.9 × is allowed; or
    - it was three times as long as its bound or longer, and goes along with the others less than most do. A client with
      many samples honestly moves further than the others, but not twelve times as far: less is only cut.

    Among three or four clients only the last two rules apply, among fewer none.

    The first few updates of a round are held and compared with each other; all later ones are compared with these. So
    memory does not depend on the number of clients.
    """

    def delta_of(each: UpdateDelta) -> RecoveredDelta:
        return recovered_delta(each.parts[WEIGHTS], layout(each.update.network).factorized)

    def group_key(each: UpdateDelta) -> NetworkSpec | None:
        return None if one_model else each.update.network

    rest = iter(arriving)
    held = list(islice(rest, REFERENCE_SIZE))
    known = [(each, delta_of(each)) for each in held if WEIGHTS in each.parts]
    usual = norms.level(WEIGHTS, None, round_number, [finite_norm(each.parts[WEIGHTS]) for each, _ in known])
    groups: dict[NetworkSpec | None, PeerGroup] = {}
    for key in dict.fromkeys(group_key(each) for each, _ in known):
        members = [(each, delta) for each, delta in known if group_key(each) == key]
        clients = [each.update.client for each, _ in members]
        if len(set(clients)) > MIN_PEERS:
            output_layer = layout(members[0][0].update.network).output_layer
            groups[key] = PeerGroup(clients, [delta for _, delta in members], output_layer, history)
    deltas = {id(each): delta for each, delta in known}

    def passes(each: UpdateDelta) -> bool:
        client, weights = each.update.client, each.parts.get(WEIGHTS)
        group = groups.get(group_key(each)) if weights else None
        if weights is None or group is None or not usual or group.median <= 0 or group.peers(client) < MIN_PEERS:
            reason = DISAGREED if history.disagreed_before(client) else None  # the common direction is not known
        else:
            own = deltas.get(id(each))
            agreement, cosine = group.compare(client, delta_of(each) if own is None else own)
            against = -cosine * finite_norm(weights)
            length = _length_over_bound(each, log.clipped)
            reason = disagreement(client, group, agreement, length > 1) or _opposition(
                group, cosine, against, usual, length
            )
        if reason:
            _log_disagreeing(each, reason, log)
        return not reason

    def disagreement(client: int, group: PeerGroup, agreement: float, too_long: bool) -> str | None:
        if not group.has_direction or group.peers(client) < MIN_PEERS_TO_JUDGE:
            return DISAGREED if history.disagreed_before(client) else None
        score = group.score(agreement, too_long=too_long)
        log.agreement[client] = min(log.agreement.get(client, score), score)  # of several tasks, the worst
        if not history.disagrees(client, score):
            return None
        return f"it disagrees with the others: agreement {agreement:.3g}, median {score.median:.3g}"

    yield from filter(passes, held)
    yield from filter(passes, rest)


def _opposition(group: PeerGroup, cosine: float, against: float, usual: float, length: float) -> str | None:
    """Return why an update goes too far against the others; None if it does not."""
    if against > (MAX_AGAINST if group.has_direction else MAX_AGAINST_UNCLEAR) * usual:
        return f"{against:.3g} of it goes against the others, who usually move by {usual:.3g}"
    if length >= FAR_TOO_LONG and cosine < group.median_cosine:
        reason = (
            f"it was {length:.3g} times as long as allowed, and does not go along with the others: cosine {cosine:.3g}"
        )
        return f"{reason}, median {group.median_cosine:.3g}"
    return None


def _length_over_bound(each: UpdateDelta, clipped: Sequence[dict[str, Any]]) -> float:
    """Return how many times as long as allowed an update was before it was clipped; 1 if it was not."""
    who = (each.update.client, each.update.tier, WEIGHTS)
    of_update = [entry for entry in clipped if (entry["client"], entry["tier"], entry["part"]) == who]
    return max((entry["norm"] / entry["bound"] if entry["bound"] else math.inf for entry in of_update), default=1.0)


def _log_disagreeing(each: UpdateDelta, reason: str, log: DefenceLog) -> None:
    update = each.update
    entry = {"client": update.client, "tier": update.tier, "kind": update.kind, "reason": reason}
    log.dropped.append(entry)
    for part in each.parts:  # a dropped update must not influence how far clients usually move
        log.norms[part][update.tier].pop(update.client, None)


# Rules that look at all updates of a round together

ITERATIONS = 5


def centered_clip(gram: Tensor, tau: float) -> Tensor:
    """Return a factor for each delta, (n,), so that the mean of the scaled deltas is that of centered clipping.

    Centered clipping (Karimireddy, He, Jaggi 2021) repeats, from v = 0,

        v ← v + (1/n) Σᵢ (Dᵢ − v) min(1, τ / ‖Dᵢ − v‖)

    v stays in the span of the deltas, v = Σⱼ cⱼ Dⱼ, so with λᵢ = min(1, τ / ‖Dᵢ − v‖) and their mean λ̄

        cⱼ ← (1 − λ̄) cⱼ + λⱼ / n    ‖Dᵢ − v‖² = Gᵢᵢ − 2 (G c)ᵢ + cᵀ G c

    The mean of deltas that are scaled by n cⱼ is v. A factor is above 1 if others were clipped: their share goes to the
    deltas that agree. If no delta is further than τ from the mean, all factors are exactly 1.
    """
    count = len(gram)
    weights = torch.zeros(count, dtype=torch.float64)
    kept = torch.zeros(count, dtype=torch.float64)  # λ
    for _ in range(ITERATIONS):
        squared = gram.diagonal() - 2 * gram @ weights + weights @ gram @ weights
        distances = squared.clamp(min=0.0).sqrt()
        kept = torch.where(distances > tau, tau / distances, 1.0)
        weights = (1 - kept.mean()) * weights + kept / count
    # With all λ = 1 the last step went to the mean, but n · (1/n) need not be 1 in floating point.
    return torch.ones(count, dtype=torch.float64) if bool((kept == 1.0).all()) else count * weights


def krum_scores(gram: Tensor, hostile: int) -> Tensor:
    """Return the score of every delta, (n,): the sum of its n − f − 2 smallest squared distances to others.

    There must be at least 2 f + 3 deltas, f of them hostile (Blanchard et al. 2017).
    """
    count, squares = len(gram), gram.diagonal()
    distances = (squares[:, None] + squares - 2 * gram).clamp(min=0.0)
    others = distances[~torch.eye(count, dtype=torch.bool)].view(count, count - 1)
    return others.sort(1).values[:, : count - hostile - 2].sum(1)


def krum(gram: Tensor, hostile: int) -> list[int]:
    """Return which deltas pass multi-Krum, in their order: the n − f with the smallest scores.

    With too few deltas for f hostile ones, f is lowered to the number that can be found among them.
    """
    hostile = min(hostile, (len(gram) - 3) // 2)
    if hostile < 1:
        return list(range(len(gram)))
    order = krum_scores(gram, hostile).argsort(stable=True)
    return sorted(order[: len(gram) - hostile].tolist())


Judge = Callable[[Sequence[UpdateDelta], Tensor], list[UpdateDelta | None]]  # None: do not merge this update


def judge_together(
    arriving: Iterable[UpdateDelta], judge: Judge, layout: Callable[[NetworkSpec], Layout], one_model: bool
) -> Iterator[UpdateDelta]:
    """Yield the updates that a rule leaves, in their order. All are held in factor form until the last one arrives.

    Updates that can be compared are judged together. If the networks are versions of one model, as FedHM's are, these
    are all updates; otherwise the updates of the same network.
    """
    held = list(arriving)
    groups: dict[NetworkSpec | None, list[int]] = {}
    for place, each in enumerate(held):
        if WEIGHTS in each.parts:
            groups.setdefault(None if one_model else each.update.network, []).append(place)
    found: list[UpdateDelta | None] = list(held)
    for places in groups.values():
        members = [held[place] for place in places]
        deltas = [recovered_delta(m.parts[WEIGHTS], layout(m.update.network).factorized) for m in members]
        for place, left in zip(places, judge(members, gram_matrix(deltas)), strict=True):
            found[place] = left
    yield from (left for left in found if left is not None)


def centered_clip_judge(history: NormHistory, round_number: int, log: DefenceLog) -> Judge:
    """Return the rule of centered clipping. τ is the median of the norms, at most the usual norm."""

    def judge(members: Sequence[UpdateDelta], gram: Tensor) -> list[UpdateDelta | None]:
        norms = [each.parts[WEIGHTS].norm for each in members]
        usual = history.level(WEIGHTS, None, round_number)
        median = statistics.median(norms)
        tau = median if usual is None else min(median, usual)
        if not tau:
            return list(members)
        found: list[UpdateDelta | None] = []
        for each, norm, factor in zip(members, norms, centered_clip(gram, tau).tolist(), strict=True):
            found.append(each if factor == 1.0 else each.with_norms({WEIGHTS: factor * norm}))
            if factor < 1.0:
                who = {"client": each.update.client, "tier": each.update.tier, "part": WEIGHTS}
                log.clipped.append(who | {"norm": norm, "bound": factor * norm})
        return found

    return judge


def krum_judge(hostile: int, log: DefenceLog) -> Judge:
    """Return the rule of multi-Krum."""

    def judge(members: Sequence[UpdateDelta], gram: Tensor) -> list[UpdateDelta | None]:
        chosen = set(krum(gram, hostile))
        scores = krum_scores(gram, min(hostile, (len(members) - 3) // 2)).tolist() if len(chosen) < len(members) else []
        found: list[UpdateDelta | None] = []
        for place, each in enumerate(members):
            found.append(each if place in chosen else None)
            if place not in chosen:
                update = each.update
                reason = f"Krum: it is among the {len(members) - len(chosen)} of {len(members)} that are furthest from "
                reason += f"the others (score {scores[place]:.3g}, median {statistics.median(scores):.3g})"
                entry = {"client": update.client, "tier": update.tier, "kind": update.kind, "reason": reason}
                log.dropped.append(entry)
        return found

    return judge
