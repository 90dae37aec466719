"""Print a digest of what every method ends in: final models and records, on each engine.

    python benchmarks/digests.py digests.json

A change that is not to change any number leaves all digests as they were. Each case is a short run of digits:
every method, with fixed and dynamic tiers, IID and Dirichlet data, with one and two workers and on Flower's simulation.
The file keeps what is done, so the same command resumes after an interruption.
"""

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fedhm.cli import main as fedhm

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
SHORT = ["train.rounds=3", "evaluation.every=2", "data.public=held-out", "data.public_samples=100"]


def cases() -> Iterator[tuple[str, list[str]]]:
    for engine, method, setting, data in itertools.product(ENGINES, METHODS, SETTINGS, PARTITIONS):
        if (method, setting) == ("fedmd", "dynamic"):
            continue  # refused: its clients keep a model of their own size
        if engine == "simulation" and method != "fedmd" and (setting == "fixed") != (data == "iid"):
            continue  # each takes half a minute: both settings and both kinds of data, but not every pair
        changes = [f"method.name={method}", f"federation.heterogeneity={setting}", f"data.partition={data}"]
        yield f"{method}, {setting}, {data}, {engine}", [*SHORT, *changes, *ENGINES[engine]]


def digest(folder: Path) -> str:
    """Return the digest of a finished run: its model files as they are, its records without seconds.

    On Flower the settings travel too, so bytes differ by the length of their text: there they are left out.
    """
    counted = 'name = "flower"' not in (folder / "config.toml").read_text()
    total = hashlib.sha256()
    for file in sorted((folder / "models").iterdir()):
        total.update(file.name.encode())
        total.update(file.read_bytes())
    for line in (folder / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        del record["seconds"]
        record.pop("norms", None)  # which versions before there were such do not have
        for traffic in [] if counted else [record["statistics"], *record["traffic"].values()]:
            del traffic["down"], traffic["up"]
        total.update(json.dumps(record, sort_keys=True).encode())
    return total.hexdigest()[:16]


def measure(changes: list[str]) -> str:
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        folder = Path(scratch) / "run"
        if fedhm(["run", "digits", "--out", str(folder), "--set", *changes]):
            raise SystemExit(said.getvalue())
        return digest(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the digests are kept")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    options = parser.parse_args()
    known: dict[str, str] = json.loads(options.file.read_text()) if options.file.exists() else {}
    for name, changes in cases():
        if options.only in name:
            if name not in known:
                known[name] = measure(changes)
                options.file.write_text(json.dumps(known, indent=1))
            print(f"{known[name]}  {name}", flush=True)
    found = sorted((name, known[name]) for name, _ in cases() if name in known)
    print(f"{hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]}  all {len(found)}")


if __name__ == "__main__":
    main()
