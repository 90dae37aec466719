"""Inner products of recovered changes, of networks that are all versions of one model: ⟨Dᵢ, Dⱼ⟩ for all pairs.

A factorized layer's change is U V − U₀ V₀ = (U, −U₀)(V; V₀), a product of factors of twice the rank. So inner products
of two such are those of small matrices, and of one with a dense change D it is ⟨Lᵀ D, R⟩: nothing is recovered.
"""

import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from fedhm.lowrank.delta import FactorizedDelta, inner_product
from fedhm.lowrank.svd import Form, to_matrix_factors, unroll
from fedhm.networks.exchange import is_averageable, upcast_half
from fedhm.networks.spec import NetworkSpec
from fedhm.server.filters.clip import DefenceLog
from fedhm.server.filters.history import (
    MIN_SPREAD,
    WEIGHTS,
    AgreementHistory,
    AgreementScore,
    Layout,
    NormHistory,
    UpdateDelta,
    finite_norm,
)

RecoveredDelta = Mapping[str, Tensor | tuple[Tensor, Tensor]]  # by name of the weight: dense, or left and right factor


def gram(changes: Sequence[RecoveredDelta]) -> Tensor:
    """Return the inner products of all pairs, (n, n)."""
    found = torch.zeros(len(changes), len(changes), dtype=torch.float64)
    for row, one in enumerate(changes):
        for column, other in enumerate(changes[: row + 1]):
            found[row, column] = found[column, row] = delta_inner_product(one, other)
    return found


def delta_inner_product(one: RecoveredDelta, other: RecoveredDelta) -> float:
    """Return the inner product of two changes."""
    return sum(_of_layer(one[name], other[name]) for name in one)


def layer_inner_products(one: RecoveredDelta, other: RecoveredDelta) -> dict[str, float]:
    """Return the inner products of two changes, layer by layer."""
    found: dict[str, float] = {}
    for name in one:
        layer = name.rpartition(".")[0]
        found[layer] = found.get(layer, 0.0) + _of_layer(one[name], other[name])
    return found


def recovered(change: FactorizedDelta, factorized: Collection[str]) -> RecoveredDelta:
    """Return a change by the names that its tensors have in the full model, its factorized layers as factors."""
    found: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
    pairs = {f"{layer}.{part}" for layer in factorized for part in ("u", "v")}
    for name, tensor in change.returned.items():
        if name not in pairs and is_averageable(tensor):
            difference = upcast_half(tensor) - upcast_half(change.sent[name])
            found[name] = torch.view_as_real(difference) if difference.is_complex() else difference
    for layer in sorted(factorized):  # sums are to have one order
        u, v = f"{layer}.u", f"{layer}.v"
        left, right = to_matrix_factors(change.returned[u], change.returned[v])
        left_sent, right_sent = to_matrix_factors(change.sent[u], change.sent[v])
        found[f"{layer}.weight"] = (
            torch.cat([left, -left_sent], 1).double(),
            torch.cat([right, right_sent], 0).double(),
        )
    return found


def _of_layer(one: Tensor | tuple[Tensor, Tensor], other: Tensor | tuple[Tensor, Tensor]) -> float:
    if isinstance(one, Tensor):
        if isinstance(other, Tensor):
            return torch.dot(one.flatten(), other.flatten().to(one.dtype)).item()
        one, other = other, one
    if isinstance(other, Tensor):
        left, right = one
        form: Form = "pufferfish" if right.shape[1] == len(other) else "spatial"
        return ((left.T @ unroll(other, form).to(left.dtype)) * right).sum().item()
    return inner_product(one, other)


# The first updates of a round that can be compared with each other, by which every update is judged.

MIN_PEERS = 2  # others, who tell which way is against theirs
MIN_PEERS_TO_JUDGE = 4  # others, of which three honest ones tell who disagrees with them
STD_PER_MAD = 1.4826  # in a median distance from the median
AGREEMENT_QUANTILE = 0.6  # of the cosines with others
CLEAR_SPREADS = 2.0  # spreads: so large is the median agreement of clients that go one way
CLEAR_SHARE = 1 / 8  # of the largest median so far, likewise


class PeerGroup:
    """Changes of one model by their clients. Those that disagree with the rest, or did before, do not tell the way.

    last  the layer that gives the outputs: who agrees is told by the others, if there are any
    """

    def __init__(
        self,
        clients: Sequence[int],
        changes: Sequence[RecoveredDelta],
        output_layer: str | None,
        known: AgreementHistory,
    ) -> None:
        self._clients, self._changes, self._last, self._known = clients, changes, output_layer, known
        products = torch.stack([self._products(change) for change in changes], 1)  # (1 + layers, n, n)
        self._lengths = products.diagonal(dim1=1, dim2=2).clamp(min=0.0).sqrt()
        self._cosines = _over(products, self._lengths[:, :, None] * self._lengths[:, None])
        trusted = [place for place, client in enumerate(clients) if not known.disagreed_before(client)]
        self._way = trusted if len(trusted) > MIN_PEERS_TO_JUDGE else list(range(len(clients)))
        for _ in clients:
            self._look()
            if self.median <= 0:
                break
            left = [place for place, seen in enumerate(self._seen) if not known.disagrees(clients[place], seen)]
            if left == self._way or len(left) <= MIN_PEERS_TO_JUDGE:
                break
            self._way = left

    @property
    def clear(self) -> bool:
        """Tell whether clients go one way at all: those that have converged do not, and nobody can be told by it."""
        return self.median > max(0.0, CLEAR_SPREADS * self._distance, CLEAR_SHARE * self._known.most)

    def others(self, client: int) -> int:
        """Return how many other clients' changes tell the way."""
        return sum(self._clients[place] != client for place in self._way)

    def compare(self, client: int, change: RecoveredDelta) -> tuple[float, float]:
        """Return how a change goes along with the others': its agreement, and its cosine as a whole."""
        own = self._stacked(layer_inner_products(change, change)).clamp(min=0.0).sqrt()
        return self._along(client, _over(self._products(change), own[:, None] * self._lengths))

    def seen(self, agreement: float) -> AgreementScore:
        return AgreementScore(agreement, self.median, self._spread)

    def _look(self) -> None:
        """Compare all with those that tell the way."""
        found = [self._along(client, self._cosines[:, place]) for place, client in enumerate(self._clients)]
        agreements, wholes = ([found[place][part] for place in self._way] for part in (0, 1))
        self.median, self.median_cosine = statistics.median(agreements), statistics.median(wholes)
        self._distance = STD_PER_MAD * statistics.median(abs(each - self.median) for each in agreements)
        self._spread = max(self._distance, MIN_SPREAD * self.median)
        self._seen = [self.seen(agreement) for agreement, _ in found]

    def _along(self, client: int, cosines: Tensor) -> tuple[float, float]:
        """Return the agreement, and the cosine with the sum of the others' changes, each of length 1.

        cosines  with each, (1 + layers, n)
        """
        others = [place for place in self._way if self._clients[place] != client]
        if not others:
            return 0.0, 0.0
        agreement = cosines[1:, others].mean(0).quantile(AGREEMENT_QUANTILE)
        length = self._cosines[0][others][:, others].sum().clamp(min=0.0).sqrt()
        return agreement.item(), _over(cosines[0, others].sum(), length).item()

    def _products(self, change: RecoveredDelta) -> Tensor:
        return torch.stack([self._stacked(layer_inner_products(change, other)) for other in self._changes], 1)

    def _stacked(self, products: dict[str, float]) -> Tensor:
        """Return the whole, then the layers that tell who agrees, (1 + layers,), in one order for all networks."""
        ordered = dict(sorted(products.items()))
        layers = [value for layer, value in ordered.items() if layer != self._last] or [*ordered.values()]
        return torch.tensor([sum(ordered.values()), *layers], dtype=torch.float64)


def _over(products: Tensor, lengths: Tensor) -> Tensor:
    """Return cosines: 0 of what did not change, −1 of what is too long to be computed."""
    return torch.where(lengths > 0, products / lengths, 0.0).nan_to_num(nan=-1.0, posinf=-1.0, neginf=-1.0)


# Robust rules that only ask for the inner products of a round's changes Dᵢ: centered clipping and multi-Krum.
#
# Centered clipping (Karimireddy, He, Jaggi 2021) repeats, from v = 0,
#
#     v ← v + (1/n) Σᵢ (Dᵢ − v) min(1, τ / ‖Dᵢ − v‖)
#
# v stays in the span of the changes, v = Σⱼ cⱼ Dⱼ, so with λᵢ = min(1, τ / ‖Dᵢ − v‖) and their mean λ̄
#
#     cⱼ ← (1 − λ̄) cⱼ + λⱼ / n    ‖Dᵢ − v‖² = Gᵢᵢ − 2 (G c)ᵢ + cᵀ G c
#
# and the mean of changes that are n cⱼ times as long is v. A factor is above 1 where others were cut: their share
# goes to those that agree. If nobody is further than τ from the mean, all factors are exactly 1.
#
# Multi-Krum (Blanchard et al. 2017) gives a change the sum of its n − f − 2 smallest squared distances to others as
# its score, with f of n hostile, and lets the n − f with the smallest scores pass.

ITERATIONS = 5


def centered_clip(gram: Tensor, tau: float) -> Tensor:
    """Return by how much each change is to be lengthened, (n,), so that their mean is that of centered clipping."""
    count = len(gram)
    weights = torch.zeros(count, dtype=torch.float64)
    for _ in range(ITERATIONS):
        squared = gram.diagonal() - 2 * gram @ weights + weights @ gram @ weights
        distances = squared.clamp(min=0.0).sqrt()
        kept = torch.where(distances > tau, tau / distances, 1.0)
        if bool((kept == 1.0).all()):  # v is the mean, whatever it was
            return torch.ones(count, dtype=torch.float64)
        weights = (1 - kept.mean()) * weights + kept / count
    return count * weights


def krum_scores(gram: Tensor, hostile: int) -> Tensor:
    """Return the score of every change, (n,); there must be at least 2 f + 3 of them."""
    count, squares = len(gram), gram.diagonal()
    distances = (squares[:, None] + squares - 2 * gram).clamp(min=0.0)
    others = distances[~torch.eye(count, dtype=torch.bool)].view(count, count - 1)
    return others.sort(1).values[:, : count - hostile - 2].sum(1)


def krum(gram: Tensor, hostile: int) -> list[int]:
    """Return which changes pass, in their order. Of too few to tell f hostile ones, as many count as can be told."""
    hostile = min(hostile, (len(gram) - 3) // 2)
    if hostile < 1:
        return list(range(len(gram)))
    order = krum_scores(gram, hostile).argsort(stable=True)
    return sorted(order[: len(gram) - hostile].tolist())


# The rules that look at all updates of a round together. They are held until the last one is there, in factor form.
#
# Those that can be compared are judged together: all of them where the networks are versions of one model, as FedHM's
# are, and otherwise those of the same network.

Judge = Callable[[Sequence[UpdateDelta], Tensor], list[UpdateDelta | None]]  # None: it is not to be merged


def judge_together(
    arriving: Iterable[UpdateDelta], judge: Judge, layout: Callable[[NetworkSpec], Layout], one_model: bool
) -> Iterator[UpdateDelta]:
    """Yield what a rule makes of the updates, in their order."""
    held = list(arriving)
    groups: dict[NetworkSpec | None, list[int]] = {}
    for place, each in enumerate(held):
        if WEIGHTS in each.parts:
            groups.setdefault(None if one_model else each.update.network, []).append(place)
    found: list[UpdateDelta | None] = list(held)
    for places in groups.values():
        members = [held[place] for place in places]
        changes = [recovered(m.parts[WEIGHTS], layout(m.update.network).factorized) for m in members]
        for place, left in zip(places, judge(members, gram(changes)), strict=True):
            found[place] = left
    yield from (left for left in found if left is not None)


def centered_clip_judge(history: NormHistory, round_number: int, log: DefenceLog) -> Judge:
    """Shorten those that are far from where the others go. τ is the median of their lengths, at most the usual one."""

    def judge(members: Sequence[UpdateDelta], inner: Tensor) -> list[UpdateDelta | None]:
        norms = [each.parts[WEIGHTS].norm for each in members]
        usual = history.level(WEIGHTS, None, round_number)
        median = statistics.median(norms)
        tau = median if usual is None else min(median, usual)
        if not tau:
            return list(members)
        found: list[UpdateDelta | None] = []
        for each, norm, factor in zip(members, norms, centered_clip(inner, tau).tolist(), strict=True):
            found.append(each if factor == 1.0 else each.cut({WEIGHTS: factor * norm}))
            if factor < 1.0:
                who = {"client": each.update.client, "tier": each.update.tier, "part": WEIGHTS}
                log.clipped.append(who | {"norm": norm, "bound": factor * norm})
        return found

    return judge


def krum_judge(hostile: int, log: DefenceLog) -> Judge:
    """Drop those that are furthest from their nearest others, fewer where some have been dropped already."""

    def judge(members: Sequence[UpdateDelta], inner: Tensor) -> list[UpdateDelta | None]:
        left = max(0, hostile - log.disagreeing)
        chosen = set(krum(inner, left))
        scores = krum_scores(inner, min(left, (len(members) - 3) // 2)).tolist() if len(chosen) < len(members) else []
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


# An update that does not go along with the others is not merged.
#
# A bound on lengths leaves an update that goes the others' way backwards four times as strong as any of them, and the
# upper bands of FedHM are averaged over two or three clients, among whom a hostile one is no minority. But all
# clients train the same layers, and there they can be compared. An update is dropped if
#
# - its client disagrees with the others, in this round or in its last ones, or did and cannot be compared
#   in this one, or
# - what of it goes against the others is longer than 0.6 × how far clients usually move: of honest ones it was never
#   longer than half of that where clients go one way. Where they do not, as those with few labels in a first round, it
#   was up to 0.72 × that, and may be 0.9 ×; or
# - it was too long, and goes along with the others less than most do: a long honest one has trained longer.
#
# Among three or four clients only the last two can be told, among fewer nothing.
#
# The first few updates of a round are held and compared with each other, all later ones with these: memory stays
# independent of the number of clients.

REFERENCE_SIZE = 12  # updates, of all networks together
DISAGREED = "it disagreed with the others in its last rounds"
MAX_AGAINST = 0.6  # times how far clients usually move: so long may be what goes against the others
MAX_AGAINST_UNCLEAR = 0.9  # likewise, where clients go no common way


def drop_disagreeing(
    arriving: Iterable[UpdateDelta],
    history: NormHistory,
    round_number: int,
    log: DefenceLog,
    layout: Callable[[NetworkSpec], Layout],
    one_model: bool,
    standing: AgreementHistory,
) -> Iterator[UpdateDelta]:
    """Yield the updates that are to be merged, in their order, and note why others are not."""

    def changed(each: UpdateDelta) -> RecoveredDelta:
        return recovered(each.parts[WEIGHTS], layout(each.update.network).factorized)

    def group(each: UpdateDelta) -> NetworkSpec | None:
        return None if one_model else each.update.network

    rest = iter(arriving)
    held = list(islice(rest, REFERENCE_SIZE))
    known = [(each, changed(each)) for each in held if WEIGHTS in each.parts]
    usual = history.level(WEIGHTS, None, round_number, [finite_norm(each.parts[WEIGHTS]) for each, _ in known])
    panels: dict[NetworkSpec | None, PeerGroup] = {}
    for name in dict.fromkeys(group(each) for each, _ in known):
        members = [(each, change) for each, change in known if group(each) == name]
        clients = [each.update.client for each, _ in members]
        if len(set(clients)) > MIN_PEERS:
            last = layout(members[0][0].update.network).output_layer
            panels[name] = PeerGroup(clients, [change for _, change in members], last, standing)
    changes = {id(each): change for each, change in known}

    def passes(each: UpdateDelta) -> bool:
        client, weights = each.update.client, each.parts.get(WEIGHTS)
        panel = panels.get(group(each)) if weights else None
        if weights is None or panel is None or not usual or panel.median <= 0 or panel.others(client) < MIN_PEERS:
            reason = DISAGREED if standing.disagreed_before(client) else None  # nobody knows the way
        else:
            own = changes.get(id(each))
            agreement, cosine = panel.compare(client, changed(each) if own is None else own)
            against, cut = -cosine * finite_norm(weights), _was_cut(each, log.clipped)
            reason = of_agreement(client, panel, agreement) or _of_length(panel, cosine, against, usual, cut)
        if reason:
            _note(each, reason, log)
        return not reason

    def of_agreement(client: int, panel: PeerGroup, agreement: float) -> str | None:
        if not panel.clear or panel.others(client) < MIN_PEERS_TO_JUDGE:
            return DISAGREED if standing.disagreed_before(client) else None
        seen = panel.seen(agreement)
        log.agreement[client] = min(log.agreement.get(client, seen), seen)  # of several tasks, the worst
        if not standing.disagrees(client, seen):
            return None
        return f"it disagrees with the others: agreement {agreement:.3g}, median {seen.median:.3g}"

    yield from filter(passes, held)
    yield from filter(passes, rest)


def _of_length(panel: PeerGroup, cosine: float, against: float, usual: float, cut: bool) -> str | None:
    if against > (MAX_AGAINST if panel.clear else MAX_AGAINST_UNCLEAR) * usual:
        return f"{against:.3g} of it goes against the others, who usually move by {usual:.3g}"
    if cut and cosine < panel.median_cosine:
        reason = f"it was too long, and does not go along with the others: cosine {cosine:.3g}"
        return f"{reason}, median {panel.median_cosine:.3g}"
    return None


def _was_cut(each: UpdateDelta, clipped: Sequence[dict[str, object]]) -> bool:
    who = (each.update.client, each.update.tier, WEIGHTS)
    return any((entry["client"], entry["tier"], entry["part"]) == who for entry in clipped)


def _note(each: UpdateDelta, reason: str, log: DefenceLog) -> None:
    update = each.update
    entry = {"client": update.client, "tier": update.tier, "kind": update.kind, "reason": reason}
    log.dropped.append(entry)
    log.disagreeing += 1
    for part in each.parts:  # how far clients usually move is not for it to say
        log.norms[part][update.tier].pop(update.client, None)
