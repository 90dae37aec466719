"""Print how the time of finished runs divides into training, merging, statistics and evaluation.

    fedhm run digits --out runs/digits --set engine.device=cpu
    python benchmarks/phases.py runs/digits

Merging is everything that the server does with the answers: checks, means, and the decompositions for all tiers.
"""

import argparse
import json
from collections import Counter
from pathlib import Path


def seconds_by_phase(folder: Path) -> Counter[str]:
    """Return the seconds of all rounds by phase."""
    total: Counter[str] = Counter()
    for line in (folder / "records.jsonl").read_text().splitlines():
        total.update(json.loads(line)["seconds"])
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    for folder in parser.parse_args().runs:
        found = seconds_by_phase(folder)
        whole = found.total()
        shares = ", ".join(f"{phase} {100 * part / whole:.1f} %" for phase, part in found.most_common())
        print(f"{folder.name}: {whole:.0f} s: {shares}")


if __name__ == "__main__":
    main()
