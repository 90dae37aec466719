"""Attack runs of a preset and tell what is left of their accuracy: without defence, and with each.

    python benchmarks/attacks.py --json attacks.json --markdown attacks.md

The demo as it is, but evaluated at its end only: twenty clients, of which some are hostile (`hostile.py`). A cell is
one run in one process, and the file keeps those that are done, so the same command resumes after an interruption.
Two processes share the cells by `--defences`, `--attacks` or `--counts`, with a file each, which then make one table:

    python benchmarks/attacks.py --json first.json second.json --done --markdown attacks.md

Accuracies are in percent, of the tiers in their order; where there are several seeds, their means.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attack_tables import LEFT_OUT, MERGED, Cell, said, summary, table
from fedhm.assembly import assemble, read_federation
from fedhm.config.loading import load_config
from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.models.build import build_model
from fedhm.report.result import Result
from fedhm.work.work import work_of
from hostile import ATTACKS, ORDER, Hostile, mislabelled
from remembered import Remembering

DEFENCES = ("none", "clip", "agreement", "centered-clip", "krum", "trimmed-mean", "median")
COUNTS = (1, 3, 6)
QUICK = ("train.rounds=2", "train.epochs=1", "train.milestones=[]")
MADE_WITH = "made with"


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


def tables(found: dict[str, dict[str, float]], listed: Sequence[Cell]) -> str:
    return f"{table(found, listed)}\nThe worst of these attacks:\n\n{summary(found, listed)}"


def read(path: Path, made_with: dict[str, str]) -> dict[str, dict[str, float]]:
    """Return the cells that a file keeps; those of other settings would make a table of what cannot be compared."""
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {MADE_WITH: made_with}
    if (theirs := written.pop(MADE_WITH)) != made_with:
        raise SystemExit(f"{path} has cells that were made with {theirs}, not with {made_with}")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, required=True, nargs="+", help="where the cells are kept; those of further files are read"
    )
    parser.add_argument("--markdown", type=Path, help="where the tables go, after every cell")
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
        options.attacks, options.counts, options.seeds, options.defences = ["flip"], [1], 1, ["none", "agreement"]
    if options.records:
        options.records.mkdir(exist_ok=True)
    changes = [*(QUICK if options.quick else ()), *options.changes]
    seeds = (options.seeds, options.attacked_seeds)
    listed = list(cells(options.attacks, options.counts, options.defences, *seeds))
    made_with = {"preset": options.preset, "set": " ".join(changes)}
    own, *others = (read(path, made_with) for path in options.json)
    found = {name: cell for each in (*reversed(others), own) for name, cell in each.items()}
    for number, cell in enumerate([] if options.done else listed, start=1):
        if cell.name not in found:
            found[cell.name] = own[cell.name] = run(cell, options.preset, changes, options.records)
            write_atomically(options.json[0], json.dumps({MADE_WITH: made_with} | own, indent=1))
            if options.markdown:
                write_atomically(options.markdown, tables(found, listed))
        counts = (f"{found[cell.name].get(key, 0):.0f} {key}" for key in (MERGED, LEFT_OUT))
        print(f"{number} of {len(listed)}: {cell.name}: {said([found[cell.name]])}; {', '.join(counts)}", flush=True)
    text = tables(found, listed)
    print(text)
    if options.markdown:
        write_atomically(options.markdown, text)


if __name__ == "__main__":
    main()
