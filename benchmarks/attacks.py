"""Attack runs of a preset and tell what is left of their accuracy: without defence, and with each.

    python benchmarks/attacks.py --json attacks.json --markdown attacks.md

The demo as it is, but evaluated at its end only: twenty clients, of which some are hostile (`hostile.py`). A cell is
one run in one process, and the file keeps those that are done, so the same command resumes after an interruption.
Accuracies are in percent, of the tiers in their order; where there are several seeds, their means.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedhm.assembly import assemble, read_federation
from fedhm.config.reading import load_config
from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.models.build import build_model
from fedhm.runs.result import Result
from fedhm.work.work import work_of
from hostile import ATTACKS, ORDER, Hostile, mislabelled
from remembered import Remembering

DEFENCES = ("none", "clip", "centered-clip", "krum", "trimmed-mean", "median")
COUNTS = (1, 3, 6)
QUICK = ("train.rounds=2", "train.epochs=1", "train.milestones=[]")
MERGED, LEFT_OUT = "hostile updates merged", "honest updates left out"


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
    attacks: Sequence[str], counts: Sequence[int], defences: Sequence[str], seeds: int, attacked_seeds: int
) -> Iterator[Cell]:
    for defence, seed in itertools.product(defences, range(seeds)):
        yield Cell("", 0, defence, seed)
    for seed, count, attack, defence in itertools.product(range(attacked_seeds), counts, attacks, defences):
        yield Cell(attack, count, defence, seed)


def run(cell: Cell, preset: str, changes: Sequence[str], records: Path | None = None) -> dict[str, float]:
    """Return by tier how accurate its model is in the end, in percent, and whose updates were merged."""
    own = [f"seed={cell.seed}", f"server.robust={cell.defence}", "train.on_bad_update=drop", "engine.workers=1"]
    own += ["server.attackers=3"] if cell.defence == "krum" else []  # the most that it can tell among ten participants
    rounds = load_config(preset, changes).train.rounds
    config = load_config(preset, [*changes, *own, f"evaluation.every={rounds}"])
    federation, hostile = read_federation(config), ORDER[: cell.hostile]
    model = build_model(config, federation.input_shape, federation.classes)
    if cell.attack == "labels":
        federation = mislabelled(federation, hostile)
    experiment = assemble(model, federation, config)
    mislabelling = frozenset(hostile if cell.attack == "labels" else ())
    settings = config.model_dump_json(exclude={"server"})

    def samples_of(client: int) -> str:
        return f"{settings}, wrong labels: {client in mislabelling}"

    experiment.engine = Remembering(experiment.engine, samples_of)
    if cell.attack:
        experiment.engine = Hostile(experiment.engine, hostile, cell.attack, config.train.max_change)
    try:
        result = experiment.run()
    except FedhmError as error:  # of a model that was destroyed, no client's training or statistics give numbers
        print(f"{cell.name}: {error}", flush=True)
        return {}
    if records:
        lines = "".join(record.to_json() + "\n" for record in result.records)
        write_atomically(records / f"{cell.name}.jsonl", lines)
    accuracies = {tier: 100 * metrics.accuracy for tier, metrics in result.metrics.items()}
    return accuracies | merged(result, hostile)


def merged(result: Result, hostile: Sequence[int]) -> dict[str, float]:
    """Return how many updates of hostile clients were merged, and how many of others were not."""
    found = {MERGED: 0.0, LEFT_OUT: 0.0}
    for record in result.records:
        dropped = {entry["client"] for entry in record.dropped if work_of(entry["kind"]).trains}
        asked = {participant.client for participant in record.participants}
        found[MERGED] += len((asked & set(hostile)) - dropped)
        found[LEFT_OUT] += len(dropped - set(hostile))
    return found


def said(found: Sequence[dict[str, float]]) -> str:
    """Return the accuracies of the tiers, which are means over seeds."""
    if not all(found):
        return "destroyed"
    tiers = [key for key in found[0] if key not in (MERGED, LEFT_OUT)]
    return " ".join(f"{statistics.fmean(each[tier] for each in found):.1f}" for tier in tiers)


def table(found: dict[str, dict[str, float]], listed: Sequence[Cell]) -> str:
    """Return a row for each attack and number of hostile clients, a column for each defence.

    Beside accuracies it has how many updates of hostile clients were merged.
    """
    defences = list(dict.fromkeys(cell.defence for cell in listed))
    known = [cell for cell in listed if cell.name in found]
    lines = [f"| attack | hostile | {' | '.join(defences)} |", f"|---|--:|{'---|' * len(defences)}"]
    rows: dict[tuple[str, int], dict[str, list[dict[str, float]]]] = {}
    for cell in known:
        alone = f"none, seed {cell.seed}" if not cell.attack else cell.attack
        for row in dict.fromkeys([alone, cell.attack or "none"]):
            rows.setdefault((row, cell.hostile), {}).setdefault(cell.defence, []).append(found[cell.name])
    for (attack, count), by_defence in rows.items():
        values = (_cell(by_defence.get(defence, ()), count) for defence in defences)
        lines.append(f"| {attack} | {count} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def _cell(found: Sequence[dict[str, float]], hostile: int) -> str:
    if not found or not all(found) or not hostile:
        return said(found) if found else ""
    return f"{said(found)} ({statistics.fmean(each[MERGED] for each in found):.0f} merged)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the cells are kept")
    parser.add_argument("--markdown", type=Path, help="where the table goes, after every cell")
    parser.add_argument("--records", type=Path, help="a folder for the records of every run")
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--set", nargs="*", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--attacks", nargs="*", default=list(ATTACKS), choices=ATTACKS)
    parser.add_argument("--counts", nargs="*", type=int, default=list(COUNTS), choices=range(1, len(ORDER) + 1))
    parser.add_argument("--defences", nargs="*", default=list(DEFENCES), choices=DEFENCES)
    parser.add_argument("--seeds", type=int, default=3, help="of runs that nobody attacks")
    parser.add_argument("--attacked-seeds", type=int, default=1, help="of runs that somebody attacks")
    parser.add_argument("--quick", action="store_true", help="two rounds, one attack: to see that it runs")
    parser.add_argument("--done", action="store_true", help="run nothing: the table of the cells that are done")
    options = parser.parse_args()
    if options.quick:
        options.attacks, options.counts, options.seeds, options.defences = ["flip"], [1], 1, ["none", "clip"]
    if options.records:
        options.records.mkdir(exist_ok=True)
    changes = [*(QUICK if options.quick else ()), *options.changes]
    seeds = (options.seeds, options.attacked_seeds)
    listed = list(cells(options.attacks, options.counts, options.defences, *seeds))
    found: dict[str, dict[str, float]] = json.loads(options.json.read_text()) if options.json.exists() else {}
    for number, cell in enumerate([] if options.done else listed, start=1):
        if cell.name not in found:
            found[cell.name] = run(cell, options.preset, changes, options.records)
            write_atomically(options.json, json.dumps(found, indent=1))
            if options.markdown:
                write_atomically(options.markdown, table(found, listed))
        counts = (f"{found[cell.name].get(key, 0):.0f} {key}" for key in (MERGED, LEFT_OUT))
        print(f"{number} of {len(listed)}: {cell.name}: {said([found[cell.name]])}; {', '.join(counts)}", flush=True)
    text = table(found, listed)
    print(text)
    if options.markdown:
        write_atomically(options.markdown, text)


if __name__ == "__main__":
    main()
