"""Attack short runs of digits and tell what is left of their accuracy: without defence, and with each.

    python benchmarks/attacks.py --json attacks.json --markdown attacks.md

Twenty clients, of which some are hostile (`hostile.py`); a cell is one run, and the file keeps those that are done, so
the same command resumes after an interruption. Accuracies are in percent, of the tiers in their order.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedhm.assembly import assemble, read_federation
from fedhm.config.reading import load_config
from fedhm.machine.files import write_atomically
from fedhm.models.build import build_model
from fedhm.server.intake import TooFewUpdatesError
from hostile import ATTACKS, ORDER, Hostile, mislabelled

DEFENCES = ("none", "clip", "centered-clip", "krum", "trimmed-mean", "median")
COUNTS = (1, 3, 6)
SHORT = (
    "train.epochs=1",
    "train.batch=32",
    "train.rounds=16",
    "train.milestones=[12]",
    "evaluation.every=16",
    "engine.workers=1",
)
QUICK = ("train.rounds=2", "train.milestones=[]")


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


def cells(
    attacks: Sequence[str], counts: Sequence[int], defences: Sequence[str], seeds: Sequence[int]
) -> Iterator[Cell]:
    for defence, seed in itertools.product(defences, seeds):
        yield Cell("", 0, defence, seed)
    for attack, count, defence in itertools.product(attacks, counts, defences):
        yield Cell(attack, count, defence)


def run(cell: Cell, preset: str, changes: Sequence[str]) -> dict[str, float]:
    """Return by tier how accurate its model is in the end, in percent."""
    own = [f"seed={cell.seed}", f"server.robust={cell.defence}", "train.on_bad_update=drop"]
    own += ["server.attackers=3"] if cell.defence == "krum" else []  # the most that it can tell among ten participants
    config = load_config(preset, [*changes, *own])
    federation, hostile = read_federation(config), ORDER[: cell.hostile]
    model = build_model(config, federation.input_shape, federation.classes)
    if cell.attack == "labels":
        federation = mislabelled(federation, hostile)
    experiment = assemble(model, federation, config)
    if cell.attack:
        experiment.engine = Hostile(experiment.engine, hostile, cell.attack, config.train.max_change)
    try:
        return {tier: 100 * metrics.accuracy for tier, metrics in experiment.run().metrics.items()}
    except TooFewUpdatesError:  # of a model that was destroyed, no client's training gives numbers
        return {}


def said(accuracies: dict[str, float]) -> str:
    return " ".join(f"{value:.1f}" for value in accuracies.values()) or "destroyed"


def table(found: dict[str, dict[str, float]], listed: Sequence[Cell]) -> str:
    """Return a row for each attack and number of hostile clients, a column for each defence."""
    defences = list(dict.fromkeys(cell.defence for cell in listed))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for cell in listed:
        row = (cell.attack or f"none, seed {cell.seed}", str(cell.hostile))
        if cell.name in found:
            rows.setdefault(row, {})[cell.defence] = said(found[cell.name])
    lines = [f"| attack | hostile | {' | '.join(defences)} |", f"|---|--:|{'---|' * len(defences)}"]
    for (attack, count), by_defence in rows.items():
        values = (by_defence.get(defence, "") for defence in defences)
        lines.append(f"| {attack} | {count} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the cells are kept")
    parser.add_argument("--markdown", type=Path, help="where the table goes")
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--set", nargs="*", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--attacks", nargs="*", default=list(ATTACKS), choices=ATTACKS)
    parser.add_argument("--counts", nargs="*", type=int, default=list(COUNTS), choices=range(1, len(ORDER) + 1))
    parser.add_argument("--defences", nargs="*", default=list(DEFENCES), choices=DEFENCES)
    parser.add_argument("--seeds", type=int, default=3, help="of runs that nobody attacks")
    parser.add_argument("--quick", action="store_true", help="two rounds, one attack: to see that it runs")
    parser.add_argument("--done", action="store_true", help="run nothing: the table of the cells that are done")
    options = parser.parse_args()
    if options.quick:
        options.attacks, options.counts, options.seeds, options.defences = ["flip"], [1], 1, ["none", "clip"]
    changes = [*SHORT, *(QUICK if options.quick else ()), *options.changes]
    listed = list(cells(options.attacks, options.counts, options.defences, range(options.seeds)))
    found: dict[str, dict[str, float]] = json.loads(options.json.read_text()) if options.json.exists() else {}
    for number, cell in enumerate([] if options.done else listed, start=1):
        if cell.name not in found:
            found[cell.name] = run(cell, options.preset, changes)
            write_atomically(options.json, json.dumps(found, indent=1))
        print(f"{number} of {len(listed)}: {cell.name}: {said(found[cell.name])}", flush=True)
    text = table(found, listed)
    print(text)
    if options.markdown:
        write_atomically(options.markdown, text)


if __name__ == "__main__":
    main()
