"""Training graphs of the library's models: gradients against PyTorch, file size, seconds of a step, memory.

    python benchmarks/on_device.py cnn mlp resnet10 resnet18 resnet34 vit --width 0.25 --batch 16

Each tier is exported and checked, and then measured as `fedhm export --card` does: a step is one batch forward and
backward with its optimizer on one thread, in processor time, each runtime in a process of its own.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from fedhm.config.registry import make
from fedhm.config.schema import TrainConfig
from fedhm.export.cards import write_training_cards
from fedhm.export.training import TrainingSource, write_training
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.plan import plan_ranks
from fedhm.models import MODELS
from fedhm.ondevice.graph import Example

TIERS = ("full", "1/2", "1/4", "1/8")
MODEL_NAMES = ("cnn", "mlp", "resnet10", "resnet18", "resnet34", "vit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODEL_NAMES)
    parser.add_argument("--tiers", nargs="+", default=TIERS)
    parser.add_argument("--width", type=float, default=0.25)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pixels", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for number, name in enumerate(options.models):
        for place, tier in enumerate(options.tiers):
            title, rule, row = rows(name, tier, options.width, options.batch, options.pixels)
            if not number and not place:
                print(f"| model | gradients within {title}\n|---|--:{rule}")
            print(row, flush=True)


def rows(name: str, tier: str, width: float, batch: int, pixels: int) -> tuple[str, str, str]:
    """Return the title, the rule and the row of a table for one tier."""
    torch.manual_seed(0)
    shape = (32,) if name == "mlp" else (1 if name == "cnn" else 3, pixels, pixels)
    more = {"image": (pixels, pixels)} if name == "vit" else {}
    network = MODELS[name](num_classes=10, in_channels=shape[0], width=width, **more)
    if tier != "full":
        network = to_hybrid(network, plan_ranks(network, tier))
    example = Example(torch.randn(64, *shape), torch.arange(64) % 10, 10)
    train = TrainConfig(batch=batch, nested=0.0)
    source = TrainingSource(network, tier, make("objectives", "classification"), train, example)
    with tempfile.TemporaryDirectory() as folder:
        done = write_training(source, Path(folder))
        _, table = write_training_cards([source], [done], Path(folder))
        title, rule, row = table.read_text(encoding="utf-8").splitlines()[:3]
    return title, rule, f"| {name} | {done.difference:.0e} {row}"


if __name__ == "__main__":
    main()
