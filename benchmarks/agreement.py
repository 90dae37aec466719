"""Tell how honest clients of digits agree with each other, who of them is cut or left out, and what that costs.

    python benchmarks/agreement.py --json agreement.json

Runs of the demo that nobody attacks, as in `attacks.py`, with clients that hold all labels or few. The margin is by how
many spreads a client stayed above where it would have been left out, in that round or in its last ones; the lowest is
said. The file keeps what is done, so the same command resumes after an interruption.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from attacks import QUICK
from fedhm.assembly import assemble, read_federation
from fedhm.config.loading import load_config
from fedhm.machine.files import write_atomically
from fedhm.models.build import build_model
from fedhm.server.filters.history import AgreementHistory
from fedhm.server.record import Record
from remembered import Remembering

PARTITIONS = {
    "iid": ["data.partition=iid"],
    "dirichlet 0.5": ["data.partition=dirichlet", "data.alpha=0.5"],
    "dirichlet 0.1": ["data.partition=dirichlet", "data.alpha=0.1"],
}


def margins(records: list[Record]) -> list[float]:
    found: list[float] = []
    standing = AgreementHistory()
    for record in records:
        found += [standing.margin(client, seen) for client, seen in record.agreement.items()]
        standing.add(record.agreement)
    return found


def honest(partition: str, seed: int, robust: str, changes: Sequence[str]) -> dict[str, float]:
    """Return every tier's accuracy in percent, and what the defence did."""
    own = [*PARTITIONS[partition], f"seed={seed}", f"server.robust={robust}", "engine.workers=1"]
    rounds = load_config("digits", changes).train.rounds
    config = load_config("digits", [*changes, *own, f"evaluation.every={rounds}"])
    federation = read_federation(config)
    experiment = assemble(build_model(config, federation.input_shape, federation.classes), federation, config)
    settings = config.model_dump_json(exclude={"server"})
    experiment.engine = Remembering(experiment.engine, lambda _: settings)
    result = experiment.run()
    found = {tier: 100 * metrics.accuracy for tier, metrics in result.metrics.items()}
    if robust != "none":
        found["updates"] = float(sum(len(record.participants) for record in result.records))
        found["left out"] = float(sum(len(record.dropped) for record in result.records))
        found["cut"] = float(sum(len(record.clipped) for record in result.records))
        if seen := margins(result.records):  # of fewer than five in a round, nobody is judged by it
            found["lowest margin"] = min(seen)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--partitions", nargs="*", default=list(PARTITIONS), choices=PARTITIONS)
    parser.add_argument("--robust", nargs="*", default=["none", "clip"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="two rounds of one run: to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.partitions, options.robust, options.seeds = ["iid"], ["clip"], 1
    found: dict[str, dict[str, float]] = json.loads(options.json.read_text()) if options.json.exists() else {}
    for partition, seed, robust in product(options.partitions, range(options.seeds), options.robust):
        name = f"{partition}, {robust}, seed {seed}"
        if name not in found:
            found[name] = honest(partition, seed, robust, [*(QUICK if options.quick else ()), *options.changes])
            write_atomically(options.json, json.dumps(found, indent=1))
        print(f"{name}:", ", ".join(f"{key} {value:.4g}" for key, value in found[name].items()), flush=True)


if __name__ == "__main__":
    main()
