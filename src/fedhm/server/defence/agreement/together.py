"""The rules that look at all updates of a round together. They are held until the last one is there, in factor form.

Those that can be compared are judged together: all of them where the networks are versions of one model, as FedHM's
are, and otherwise those of the same network.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from fedhm.server.defence.agreement.gram import gram, recovered
from fedhm.server.defence.agreement.rules import centered_clip, krum, krum_scores
from fedhm.server.defence.clip import Findings
from fedhm.server.defence.moved import WEIGHTS, Layout, Moved
from fedhm.server.defence.norms import History

Judge = Callable[[Sequence[Moved], Tensor], list[Moved | None]]  # None: it is not to be merged


def judged_together(
    arriving: Iterable[Moved], judge: Judge, layout: Callable[[str], Layout], one_model: bool
) -> Iterator[Moved]:
    """Yield what a rule makes of the updates, in their order."""
    held = list(arriving)
    groups: dict[str, list[int]] = {}
    for place, each in enumerate(held):
        if WEIGHTS in each.parts:
            groups.setdefault("" if one_model else each.update.network, []).append(place)
    found: list[Moved | None] = list(held)
    for places in groups.values():
        members = [held[place] for place in places]
        changes = [recovered(m.parts[WEIGHTS], layout(m.update.network).factorized) for m in members]
        for place, left in zip(places, judge(members, gram(changes)), strict=True):
            found[place] = left
    yield from (left for left in found if left is not None)


def by_centered_clip(history: History, round_number: int, findings: Findings) -> Judge:
    """Shorten those that are far from where the others go. τ is the median of their lengths, at most the usual one."""

    def judge(members: Sequence[Moved], inner: Tensor) -> list[Moved | None]:
        norms = [each.parts[WEIGHTS].norm for each in members]
        usual = history.level(WEIGHTS, None, round_number)
        median = statistics.median(norms)
        tau = median if usual is None else min(median, usual)
        if not tau:
            return list(members)
        found: list[Moved | None] = []
        for each, norm, factor in zip(members, norms, centered_clip(inner, tau).tolist(), strict=True):
            found.append(each if factor == 1.0 else each.cut({WEIGHTS: factor * norm}))
            if factor < 1.0:
                who = {"client": each.update.client, "tier": each.update.tier, "part": WEIGHTS}
                findings.clipped.append(who | {"norm": norm, "bound": factor * norm})
        return found

    return judge


def by_krum(hostile: int, findings: Findings) -> Judge:
    """Drop those that are furthest from their nearest others, fewer where some have been dropped already."""

    def judge(members: Sequence[Moved], inner: Tensor) -> list[Moved | None]:
        left = max(0, hostile - findings.disagreeing)
        chosen = set(krum(inner, left))
        scores = krum_scores(inner, min(left, (len(members) - 3) // 2)).tolist() if len(chosen) < len(members) else []
        found: list[Moved | None] = []
        for place, each in enumerate(members):
            found.append(each if place in chosen else None)
            if place not in chosen:
                update = each.update
                reason = f"Krum: it is among the {len(members) - len(chosen)} of {len(members)} that are furthest from "
                reason += f"the others (score {scores[place]:.3g}, median {statistics.median(scores):.3g})"
                entry = {"client": update.client, "tier": update.tier, "kind": update.kind, "reason": reason}
                findings.dropped.append(entry)
        return found

    return judge
