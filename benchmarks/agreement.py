"""Count the honest updates that `server.robust = "agreement"` drops when clients are unlike.

    python benchmarks/agreement.py --json agreement.json

Nobody attacks in these runs. A setting deals out the samples of a preset in an unusual way, or trains for long. Every
dropped update is a mistake of the rule, and at most one in a thousand may be one. The file keeps the runs that are
done, so the same command resumes after an interruption.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhm.assembly import assemble, read_federation
from fedhm.config.loading import load_config
from fedhm.data.federation import Federation
from fedhm.data.samples import Samples, concatenate
from fedhm.machine.files import write_atomically
from fedhm.models.build import build_model
from fedhm.work.work import work_of

PRESETS = {
    "digits": [],
    "fashion-mnist-quick": ["data.train_samples=3000"],
    "cifar10-tiers": ["data.train_samples=3000", "server.optimizer=none"],
}
SHORT = ["train.rounds=10", "train.milestones=[]", "evaluation.every=10", "engine.workers=1"]
QUICK = ["train.rounds=2", "train.epochs=1", "train.milestones=[]", "evaluation.every=2", "engine.workers=1"]

MADE_WITH = "made with"

Deal = Callable[[Samples, int, np.random.Generator], list[Samples]]


def deal_by_class(samples: Samples, clients: int, rng: np.random.Generator) -> list[Samples]:
    """Give each client samples of a single class, or of as few as cover all classes."""
    by_class = [rng.permutation(np.flatnonzero(samples.labels == label)) for label in samples.labels.unique()]
    sharing = -(-clients // len(by_class))  # clients that share a class
    pieces = [piece for each in by_class for piece in np.array_split(each, sharing)]
    dealt = np.array_split(np.arange(len(pieces)), clients)  # one piece each, if there are enough clients
    return [samples.subset(torch.from_numpy(np.concatenate([pieces[n] for n in own]))) for own in dealt]


def deal_one_sample(samples: Samples, clients: int, rng: np.random.Generator) -> list[Samples]:
    """Give each client a single sample."""
    return [samples.subset(torch.tensor([index])) for index in rng.permutation(len(samples))[:clients].tolist()]


def deal_unequal(samples: Samples, clients: int, rng: np.random.Generator) -> list[Samples]:
    """Give the largest client about a hundred times as many samples as the smallest."""
    sizes = np.geomspace(100, 1, clients)
    cuts = np.cumsum(np.maximum(2, sizes / sizes.sum() * len(samples))).astype(int)[:-1]
    return [samples.subset(torch.from_numpy(share)) for share in np.split(rng.permutation(len(samples)), cuts)]


def deal_noisy(samples: Samples, clients: int, rng: np.random.Generator) -> list[Samples]:
    """Give each client an equal share. Three labels in ten are wrong."""
    wrong = torch.from_numpy(rng.random(len(samples)) < 0.3)
    drawn = torch.from_numpy(rng.integers(int(samples.labels.max()) + 1, size=len(samples)))
    noisy = replace(samples, labels=torch.where(wrong, drawn, samples.labels))
    return [noisy.subset(torch.from_numpy(share)) for share in np.array_split(rng.permutation(len(samples)), clients)]


@dataclass(frozen=True)
class Setting:
    """How a setting differs from its preset."""

    changes: Sequence[str] = field(default_factory=tuple)
    deal: Deal | None = None  # in place of the preset's partition


SETTINGS = {
    "iid": Setting(),
    "α 0.5, 10 epochs": Setting(["data.partition=dirichlet", "data.alpha=0.5", "train.epochs=10"]),
    "α 0.1, 10 epochs": Setting(["data.partition=dirichlet", "data.alpha=0.1", "train.epochs=10"]),
    "one class each": Setting(deal=deal_by_class),
    "one sample each": Setting(deal=deal_one_sample),
    "sizes 100 to 1": Setting(deal=deal_unequal),
    "wrong labels": Setting(deal=deal_noisy),
}


def dealt_out(federation: Federation, deal: Deal | None, seed: int) -> Federation:
    if deal is None:
        return federation
    clients = deal(concatenate(federation.clients), federation.size, np.random.default_rng(seed))
    return replace(federation, clients=clients)


def honest(preset: str, name: str, seed: int, changes: Sequence[str]) -> dict[str, float]:
    """Return how many updates of a run were dropped and cut, and the accuracy of its smallest tier in percent."""
    own = [*PRESETS[preset], *changes, *SETTINGS[name].changes, f"seed={seed}", "server.robust=agreement"]
    config = load_config(preset, own)
    federation = dealt_out(read_federation(config), SETTINGS[name].deal, seed)
    result = assemble(build_model(config, federation.input_shape, federation.classes), federation, config).run()
    dropped = [entry for record in result.records for entry in record.dropped if work_of(entry["kind"]).trains]
    for entry in dropped:
        print(f"  client {entry['client']}: {entry['reason']}", flush=True)
    return {
        "updates": sum(len(record.participants) for record in result.records),
        "dropped": len(dropped),
        "cut": sum(entry["part"] == "weights" for record in result.records for entry in record.clipped),
        "accuracy": 100 * list(result.metrics.values())[-1].accuracy,
    }


def table(found: dict[str, Any], seeds: int) -> str:
    """Return one line for each preset and setting that is done, and a line for all."""
    lines = ["| data | setting | updates | dropped | cut | smallest tier, % |", "|---|---|--:|--:|--:|--:|"]
    total = {"updates": 0.0, "dropped": 0.0, "cut": 0.0}
    for preset, setting in product(PRESETS, SETTINGS):
        runs = [found[name] for seed in range(seeds) if (name := f"{preset}, {setting}, {seed}") in found]
        if not runs:
            continue
        sums = {key: sum(run[key] for run in runs) for key in total}
        total = {key: total[key] + sums[key] for key in total}
        accuracy = sum(run["accuracy"] for run in runs) / len(runs)
        numbers = " | ".join(f"{sums[key]:.0f}" for key in total)
        lines.append(f"| {preset} | {setting} | {numbers} | {accuracy:.1f} |")
    return "\n".join([*lines, f"| all | | {' | '.join(f'{value:.0f}' for value in total.values())} | |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--presets", nargs="*", default=list(PRESETS), choices=PRESETS)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="two rounds of one run: to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.presets, options.settings, options.seeds = ["digits"], ["one class each"], 1
    found: dict[str, Any] = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    changes = [*(QUICK if options.quick else SHORT), *options.changes]
    made_with = " ".join(changes)
    if found.setdefault(MADE_WITH, made_with) != made_with:
        raise SystemExit(f"{options.json} has runs that were made with {found[MADE_WITH]}, not with {made_with}")
    for seed, preset, setting in product(range(options.seeds), options.presets, options.settings):
        name = f"{preset}, {setting}, {seed}"
        if name not in found:
            print(name, flush=True)
            found[name] = honest(preset, setting, seed, changes)
            write_atomically(options.json, json.dumps(found, indent=1))
    print(table(found, options.seeds))


if __name__ == "__main__":
    main()
