"""What the runs of `attacks.py` are called, and the tables that are made of their accuracies."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

MERGED, LEFT_OUT = "hostile updates merged", "honest updates left out"

Found = Mapping[
    str, dict[str, float]
]  # by a cell's name: accuracies by tier, in percent, and whose updates were merged


@dataclass(frozen=True)
class Cell:
    attack: str  # empty: none
    hostile: int
    defence: str
    seed: int = 0

    @property
    def name(self) -> str:
        who = f"{self.attack} by {self.hostile}" if self.attack else "nobody attacks"
        return f"{who}, {self.defence}, seed {self.seed}"

    @property
    def clean(self) -> "Cell":
        return replace(self, attack="", hostile=0)


def accuracies(found: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in found.items() if key not in (MERGED, LEFT_OUT)}


def said(found: Sequence[dict[str, float]]) -> str:
    """Return the accuracies of the tiers, which are means over seeds."""
    if not all(found):
        return "destroyed"
    return " ".join(f"{statistics.fmean(each[tier] for each in found):.1f}" for tier in accuracies(found[0]))


def table(found: Found, listed: Sequence[Cell]) -> str:
    """Return a row for each attack and number of hostile clients, a column for each defence.

    Beside accuracies it has how many updates of hostile clients were merged.
    """
    defences = list(dict.fromkeys(cell.defence for cell in listed))
    known = [cell for cell in listed if cell.name in found]
    rows: dict[tuple[str, int], dict[str, list[dict[str, float]]]] = {}
    several = len({cell.seed for cell in known if not cell.attack}) > 1
    for cell in known:
        alone = f"none, seed {cell.seed}" if several and not cell.attack else cell.attack or "none"
        for row in dict.fromkeys([alone, cell.attack or "none"]):
            rows.setdefault((row, cell.hostile), {}).setdefault(cell.defence, []).append(found[cell.name])
    lines = _head("attack | hostile", "|---|--:|", defences)
    for (attack, count), by_defence in rows.items():
        values = (_cell(by_defence.get(defence, ()), count) for defence in defences)
        lines.append(f"| {attack} | {count} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def _head(first: str, rule: str, defences: Sequence[str]) -> list[str]:
    return [f"| {first} | {' | '.join(defences)} |", f"{rule}{'---|' * len(defences)}"]


def _cell(found: Sequence[dict[str, float]], hostile: int) -> str:
    if not found or not all(found) or not hostile:
        return said(found) if found else ""
    return f"{said(found)} ({statistics.fmean(each[MERGED] for each in found):.0f} merged)"


def summary(found: Found, listed: Sequence[Cell]) -> str:
    """Return how much the worst attack costs, by number of hostile clients and defence.

    In points of accuracy against the same seed's run that nobody attacks, with the same defence: the mean over tiers,
    and the tier that loses most. With nobody hostile it is what the defence itself costs, against the runs without.
    """
    defences = list(dict.fromkeys(cell.defence for cell in listed))
    lines = _head("hostile | lost", "|--:|---|", defences)
    for hostile in sorted({cell.hostile for cell in listed}):
        of = {d: [cell for cell in listed if (cell.hostile, cell.defence) == (hostile, d)] for d in defences}
        worst = {defence: _worst(found, each) for defence, each in of.items()}
        for place, how in enumerate(("mean over tiers", "worst tier")):
            lines.append(f"| {hostile} | {how} | {' | '.join(worst[defence][place] for defence in defences)} |")
    return "\n".join(lines) + "\n"


def _worst(found: Found, cells: Sequence[Cell]) -> tuple[str, str]:
    """Return the largest mean loss and the largest loss of a tier, each with the attack that caused it."""
    by_attack: dict[str, list[dict[str, float]]] = {}
    for cell in cells:
        for loss in _loss(found, cell):
            by_attack.setdefault(cell.attack, []).append(loss)
    if not by_attack:
        return "", ""
    attacks = len({cell.attack for cell in cells})
    done = f"{len(by_attack)} of {attacks} attacks" if len(by_attack) < attacks else ""
    if destroyed := [attack for attack, losses in by_attack.items() if not all(losses)]:
        text = _because("destroyed", *destroyed, done)
        return text, text
    tiers = {(attack, tier): _mean(losses, tier) for attack, losses in by_attack.items() for tier in losses[0]}
    means = {
        attack: statistics.fmean(_mean(losses, tier) for tier in losses[0]) for attack, losses in by_attack.items()
    }
    worst, hardest = max(means, key=means.__getitem__), max(tiers, key=tiers.__getitem__)
    return _because(f"{means[worst]:z.1f}", worst, done), _because(f"{tiers[hardest]:z.1f}", *hardest, done)


def _because(text: str, *reasons: str) -> str:
    why = ", ".join(filter(None, reasons))  # where nobody attacks there is no attack to name
    return f"{text} ({why})" if why else text


def _loss(found: Found, cell: Cell) -> Iterator[dict[str, float]]:
    """Yield the loss of each tier, none if the model was destroyed; nothing if a run that is needed was not made."""
    reference = cell.clean if cell.attack else replace(cell, defence="none")
    if cell.name in found and reference.name in found:
        before, after = accuracies(found[reference.name]), accuracies(found[cell.name])
        yield {tier: before[tier] - after[tier] for tier in after}


def _mean(losses: Sequence[dict[str, float]], tier: str) -> float:
    return statistics.fmean(loss[tier] for loss in losses)
