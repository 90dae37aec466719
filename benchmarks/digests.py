"""Print a digest of what every method ends in: final models and records, on each engine.

    python benchmarks/digests.py digests.json

A change that is not to change any number leaves all digests as they were. Each case is a short run of digits:
every method, with fixed and dynamic tiers, IID and Dirichlet data, with one and two workers and on Flower's simulation.
FedHM also runs with every setting that takes another path through the server, and adapters run on a small network.
The file keeps finished cases, so the same command resumes after an interruption.
"""

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedhm import run
from fedhm.cli import main as fedhm
from fedhm.config.presets import presets
from fedhm.machine.tensors import update_digest

METHODS = (
    *("fedhm", "fedavg", "slimmed", "heterofl", "fedrolex", "fjord"),
    *("splitmix", "fedpara", "feddlr", "fedmd", "feddf", "capable"),
)
SETTINGS = ("fixed", "dynamic")
PARTITIONS = ("iid", "dirichlet")
ENGINES = {
    "1 worker": ["engine.workers=1"],
    "2 workers": ["engine.workers=2"],
    "simulation": ["engine.name=flower"],
}
# Settings that take another path through the server or the clients, as `--set` takes them.
VARIANTS = {
    "models": ["method.aggregate=models"],
    "updates": ["method.aggregate=updates"],
    "without nesting": ["train.nested=0"],
    "random nesting": ["train.nested_tier=random", "train.nested_form=beside"],
    "nesting instead": ["train.nested_form=instead"],
    "warm-up": ["method.warmup=1", "method.start=smallest"],
    "pufferfish": ["method.form=pufferfish"],
    "softmax": ["method.weighting=softmax"],
    "budgets": ['method.tiers=[1, "bytes:60kB", "parameters:9k"]', "method.replan=[1]"],
    "budget of memory": ['method.tiers=[1, "memory:1.5MB"]'],
    "server momentum": ["server.optimizer=momentum", "server.momentum=0.5"],
    "server adam": ["server.optimizer=adam"],
    "no defence": ["server.robust=none"],
    "centered clip": ["server.robust=centered-clip"],
    "krum": ["server.robust=krum"],
    "median": ["server.robust=median"],
    "trimmed mean": ["server.robust=trimmed-mean"],
    "stop": ["stop.patience=1", "evaluation.every=1"],
    "running averages": ["evaluation.static_from=never"],
    "tests at clients": ["data.client_test=0.2"],
    "min updates": ["federation.min_updates=10", "federation.attempts=2"],
    "adamw": ["train.optimizer=adamw", "train.lr=0.002"],
    "micro-batches": [
        *("train.micro_batch=8", "train.checkpointing=true", "train.epochs=1"),
        *("model.name=resnet10", "model.width=0.125"),
    ],
    "clip norm": ["train.clip_norm=1"],
    "resnet": ["model.name=resnet10", "model.width=0.125", "train.epochs=1"],
}
FLEET = """
[[federation.devices]]
name = "desktop"
share = 0.5
memory = "64MB"

[[federation.devices]]
name = "sensor"
share = 0.5
memory = "2.2MB"
speed = 0.001
up = "1Mbit"
down = "2Mbit"
"""
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"name": "lora"},
    "lora, models": {"name": "lora", "aggregate": "models"},
    "lora, partitions": {"name": "lora", "aggregate": "partitions"},
    "lora, fold": {"name": "lora", "fold": True, "fold_rank": 6},
    "homolora": {"name": "homolora"},
    "hetlora": {"name": "hetlora"},
    "hetlora, prune": {"name": "hetlora", "prune": 0.5},
    "flora": {"name": "flora"},
    "ffalora": {"name": "ffalora"},
    "fedsa": {"name": "fedsa"},
    "fedsa, shared head": {"name": "fedsa", "share_head": True},
}
SHORT = ["train.rounds=3", "evaluation.every=2", "data.public=held-out", "data.public_samples=100"]


def cases() -> Iterator[tuple[str, list[str]]]:
    for engine, method, setting, data in itertools.product(ENGINES, METHODS, SETTINGS, PARTITIONS):
        if (method, setting) == ("fedmd", "dynamic"):
            continue  # refused: its clients keep a model of their own size
        if engine == "simulation" and method != "fedmd" and (setting == "fixed") != (data == "iid"):
            continue  # each takes half a minute: both settings and both kinds of data, but not every pair
        changes = [f"method.name={method}", f"federation.heterogeneity={setting}", f"data.partition={data}"]
        yield f"{method}, {setting}, {data}, {engine}", [*SHORT, *changes, *ENGINES[engine]]
    for name, changes in VARIANTS.items():
        yield f"fedhm, {name}", [*SHORT, "data.partition=dirichlet", "engine.workers=2", *changes]


def digest(folder: Path) -> str:
    """Return the digest of a finished run: its model files as they are, its records without seconds and device.

    On Flower the settings travel too, so bytes differ by the length of their text: there they are left out.
    """
    counted = 'name = "flower"' not in (folder / "config.toml").read_text()
    total = hashlib.sha256()
    models = folder / "models"
    for file in sorted(path for path in models.rglob("*") if path.is_file()):  # those of the best round among them
        total.update(str(file.relative_to(models)).encode())
        for name, tensor in sorted(load_file(file).items()):  # not the headers, which differ between versions
            update_digest(total, tensor, name)
    for line in (folder / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        record["metrics"] = record.pop("scores", None) or record.pop("metrics", {})  # as earlier versions call them
        for name in ("seconds", "chain", "digest", "device"):
            record.pop(name, None)
        for traffic in [] if counted else [record["statistics"], *record["traffic"].values()]:
            del traffic["down"], traffic["up"]
        total.update(json.dumps(record, sort_keys=True).encode())
    return total.hexdigest()[:16]


def measure(preset: str, changes: list[str]) -> str:
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        folder = Path(scratch) / "run"
        if fedhm(["run", preset, "--out", str(folder), "--set", *changes]):
            raise SystemExit(said.getvalue())
        return digest(folder)


def measure_fleet() -> str:
    """Run digits on two kinds of devices, one of which affords small tiers only."""
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "fleet.toml"
        config.write_text(presets()["digits"] + FLEET)
        return measure(str(config), [*SHORT, "federation.deadline=60"])


class Attention(nn.Module):
    """A small network with layers named as those of a transformer, for adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.classifier = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.value(torch.tanh(self.query(inputs)))))  # type: ignore[no-any-return]


def measure_adapters(method: dict[str, Any]) -> str:
    ranks = {} if method["name"] in ("homolora", "ffalora", "fedsa") else {"ranks": [8, 4, 2]}
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(180, 12, generator=generator)
    labels = (inputs[:, :4].argmax(1)).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Attention()
    clients = [(inputs[start : start + 20], labels[start : start + 20]) for start in range(0, 120, 20)]
    config = {"train": {"rounds": 4, "batch": 5}, "method": {**method, **ranks}, "engine": {"workers": 2, "threads": 1}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        run(model, clients, (inputs[120:], labels[120:]), config, folder, progress=False)
        return digest(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the digests are kept")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    options = parser.parse_args()
    known: dict[str, str] = json.loads(options.file.read_text()) if options.file.exists() else {}
    work: dict[str, Callable[[], str]] = {name: partial(measure, "digits", changes) for name, changes in cases()}
    work["fedhm, fleet"] = measure_fleet
    work |= {name: partial(measure_adapters, method) for name, method in ADAPTERS.items()}
    for name, found in work.items():
        if options.only in name:
            if name not in known:
                known[name] = found()
                options.file.write_text(json.dumps(known, indent=1))
            print(f"{known[name]}  {name}", flush=True)
    finished = sorted((name, known[name]) for name in work if name in known)
    print(f"{hashlib.sha256(json.dumps(finished).encode()).hexdigest()[:16]}  all {len(finished)}")


if __name__ == "__main__":
    main()
