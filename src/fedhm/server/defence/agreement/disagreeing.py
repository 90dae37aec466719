"""An update that does not go along with the others is not merged.

A bound on lengths leaves an update that goes the others' way backwards four times as strong as any of them, and the
upper bands of FedHM are averaged over two or three clients, among whom a hostile one is no minority. But all clients
train the same layers, and there they can be compared. An update is dropped if

- its client disagrees with the others, in this round or in its last ones (`standing.py`), or did and cannot be compared
  in this one, or
- what of it goes against the others is longer than 0.6 × how far clients usually move: of honest ones it was never
  longer than half of that where clients go one way. Where they do not, as those with few labels in a first round, it
  was up to 0.72 × that, and may be 0.9 ×; or
- it was too long, and goes along with the others less than most do: a long honest one has trained longer.

Among three or four clients only the last two can be told, among fewer nothing.

The first few updates of a round are held and compared with each other, all later ones with these: memory stays
independent of the number of clients.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from fedhm.server.defence.agreement.gram import Recovered, recovered
from fedhm.server.defence.agreement.panel import FEWEST, TELLING, Panel
from fedhm.server.defence.agreement.standing import Standing
from fedhm.server.defence.clip import Findings
from fedhm.server.defence.moved import WEIGHTS, Layout, Moved, length
from fedhm.server.defence.norms import History

HELD = 12  # updates, of all networks together
DISAGREED = "it disagreed with the others in its last rounds"
AGAINST = 0.6  # times how far clients usually move: so long may be what goes against the others
AGAINST_NO_WAY = 0.9  # likewise, where clients go no common way


def drop_disagreeing(
    arriving: Iterable[Moved],
    history: History,
    round_number: int,
    findings: Findings,
    layout: Callable[[str], Layout],
    one_model: bool,
    standing: Standing,
) -> Iterator[Moved]:
    """Yield the updates that are to be merged, in their order, and note why others are not."""

    def changed(each: Moved) -> Recovered:
        return recovered(each.parts[WEIGHTS], layout(each.update.network).factorized)

    def group(each: Moved) -> str:
        return "" if one_model else each.update.network

    rest = iter(arriving)
    held = list(islice(rest, HELD))
    known = [(each, changed(each)) for each in held if WEIGHTS in each.parts]
    usual = history.level(WEIGHTS, None, round_number, [length(each.parts[WEIGHTS]) for each, _ in known])
    panels: dict[str, Panel] = {}
    for name in dict.fromkeys(group(each) for each, _ in known):
        members = [(each, change) for each, change in known if group(each) == name]
        clients = [each.update.client for each, _ in members]
        if len(set(clients)) > FEWEST:
            last = layout(members[0][0].update.network).last
            panels[name] = Panel(clients, [change for _, change in members], last, standing)
    changes = {id(each): change for each, change in known}

    def passes(each: Moved) -> bool:
        client, weights = each.update.client, each.parts.get(WEIGHTS)
        panel = panels.get(group(each)) if weights else None
        if weights is None or panel is None or not usual or panel.median <= 0 or panel.others(client) < FEWEST:
            reason = DISAGREED if standing.was_out(client) else None  # nobody knows the way
        else:
            own = changes.get(id(each))
            agreement, cosine = panel.along(client, changed(each) if own is None else own)
            against, cut = -cosine * length(weights), _was_cut(each, findings.clipped)
            reason = of_agreement(client, panel, agreement) or _of_length(panel, cosine, against, usual, cut)
        if reason:
            _note(each, reason, findings)
        return not reason

    def of_agreement(client: int, panel: Panel, agreement: float) -> str | None:
        if not panel.clear or panel.others(client) < TELLING:
            return DISAGREED if standing.was_out(client) else None
        seen = panel.seen(agreement)
        findings.agreement[client] = min(findings.agreement.get(client, seen), seen)  # of several tasks, the worst
        if not standing.out(client, seen):
            return None
        return f"it disagrees with the others: agreement {agreement:.3g}, median {seen.median:.3g}"

    yield from filter(passes, held)
    yield from filter(passes, rest)


def _of_length(panel: Panel, cosine: float, against: float, usual: float, cut: bool) -> str | None:
    if against > (AGAINST if panel.clear else AGAINST_NO_WAY) * usual:
        return f"{against:.3g} of it goes against the others, who usually move by {usual:.3g}"
    if cut and cosine < panel.median_cosine:
        reason = f"it was too long, and does not go along with the others: cosine {cosine:.3g}"
        return f"{reason}, median {panel.median_cosine:.3g}"
    return None


def _was_cut(each: Moved, clipped: Sequence[dict[str, object]]) -> bool:
    who = (each.update.client, each.update.tier, WEIGHTS)
    return any((entry["client"], entry["tier"], entry["part"]) == who for entry in clipped)


def _note(each: Moved, reason: str, findings: Findings) -> None:
    update = each.update
    entry = {"client": update.client, "tier": update.tier, "kind": update.kind, "reason": reason}
    findings.dropped.append(entry)
    findings.disagreeing += 1
    for part in each.parts:  # how far clients usually move is not for it to say
        findings.norms[part][update.tier].pop(update.client, None)
