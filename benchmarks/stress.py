"""Sweep learning rate × local epochs × label skew × data for every method, and print one page.

    python benchmarks/stress.py --json stress.json --markdown stress.md

A cell has the final accuracy of a method's largest and smallest tier, in percent. A row fails if a tier of FedHM is
`MARGIN` points or more below full-model FedAvg: where FedAvg trains, every tier should. Further rows have unusual
clients, and a network without normalisation layers. The file keeps the runs that are done, so the same command resumes
after an interruption.

FedHM's limit on gradients is chosen by the same sweep, on samples that are held out of the training data:

    python benchmarks/stress.py --json steps.json --held-out --methods fedavg --steps 0 0.1 0.2 0.4 --no-unusual
"""

import argparse
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from torch import nn

from agreement import PRESETS, Setting, deal_by_class, deal_one_sample, deal_unequal, dealt_out
from fedhm.assembly import assemble, read_federation
from fedhm.compare.execute import config_of
from fedhm.compare.select import Reference, resolve_entries
from fedhm.config.loading import load_config
from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.models.build import build_model

METHODS = (
    *("fedhm", "fedhm-paper", "lowrank:1/8", "fedavg", "capable", "slimmed:0.35", "heterofl", "fedrolex"),
    *("fjord", "splitmix", "feddlr", "fedpara"),  # fedmd and feddf need public samples
)
RATES, EPOCHS, ALPHAS = (0.03, 0.1, 0.3), (1, 5, 10), ("0.1", "0.5", "iid")
WORK = 30  # local epochs of a client in all rounds that it takes part in, so that rows take about the same time
MARGIN = 10.0  # points below FedAvg
DIVERGED = "diverged"
HELD_OUT = 0.2  # share of each client's training samples


@dataclass(frozen=True)
class Column:
    """A method, or FedHM with a limit of its own."""

    method: str
    step: float | None = None  # the longest step, learning rate × gradient norm; 0: no limit; None: the method's own

    def __str__(self) -> str:
        return self.method if self.step is None else f"{self.method}, step {self.step:g}" if self.step else "no limit"

    def changes(self, lr: float) -> list[str]:
        return [] if self.step is None else [f"train.clip_norm={self.step / lr}"]


def without_normalisation(model: nn.Module) -> nn.Module:
    """Return the model without its BatchNorm layers."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.Identity())
    return model


@dataclass(frozen=True)
class Row:
    """A setting of the sweep."""

    preset: str
    name: str
    setting: Setting = field(default_factory=Setting)
    change_model: Callable[[nn.Module], nn.Module] = field(default=lambda model: model)

    @property
    def key(self) -> str:
        return f"{self.preset}, {self.name}"


def sweep(
    presets: Sequence[str], rates: Sequence[float], epochs: Sequence[int], alphas: Sequence[str]
) -> Iterator[Row]:
    for preset, alpha, local, rate in product(presets, alphas, epochs, rates):
        partition = ["data.partition=iid"] if alpha == "iid" else ["data.partition=dirichlet", f"data.alpha={alpha}"]
        changes = [
            *partition,
            f"train.epochs={local}",
            f"train.lr={rate}",
            f"train.rounds={max(3, WORK // local // 2)}",
        ]
        skew = alpha if alpha == "iid" else f"α {alpha}"
        epochs_text = "1 epoch" if local == 1 else f"{local} epochs"
        yield Row(preset, f"{skew}, {epochs_text}, lr {rate:g}", Setting(changes))


def unusual(presets: Sequence[str]) -> Iterator[Row]:
    short = ["train.rounds=8"]
    for preset in presets:
        yield Row(preset, "2 clients with other classes", Setting([*short, "federation.clients=2"], deal_by_class))
        yield Row(preset, "one class each", Setting(short, deal_by_class))
        yield Row(preset, "one sample each", Setting(short, deal_one_sample))
        yield Row(preset, "sizes 100 to 1", Setting(short, deal_unequal))
        no_norm = ["train.rounds=20", "federation.participation=1"]
        yield Row(preset, "no normalisation", Setting(no_norm), without_normalisation)
        warm = [*no_norm, "method.warmup=5"]  # FedHM only: all clients train the full model at first
        yield Row(preset, "no normalisation, 5 rounds of warm-up", Setting(warm), without_normalisation)


def run(row: Row, column: Column, held_out: bool = False, settings: Sequence[str] = ()) -> list[float] | None:
    """Return the accuracy of every tier in percent, the largest first; None if training diverged."""
    common = ["train.milestones=[]", "evaluation.every=1000", "engine.workers=1", "server.robust=none", *settings]
    common += [f"data.validation={HELD_OUT}"] if held_out else []
    changes = [*PRESETS[row.preset], *common, *row.setting.changes]
    config = load_config(row.preset, changes)
    config = load_config(row.preset, [*changes, *column.changes(config.train.lr)])
    (entry,) = resolve_entries([column.method], Reference(config))
    own = config_of(config.model_dump(mode="json", exclude={"compare"}), entry, config.seed)
    federation = dealt_out(read_federation(own), row.setting.deal, config.seed)
    model = row.change_model(build_model(own, federation.input_shape, federation.classes))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the page says which runs diverged
            result = assemble(model, federation, own).run()
    except FedhmError as error:
        if not any(said in str(error) for said in ("cannot be used", "could be used", "has diverged")):
            raise
        return None
    return [100 * metrics.accuracy for metrics in result.metrics.values()]


Found = dict[str, dict[str, list[float] | None]]  # by row and column: as `run` returns it


def fails(row: Row, found: Found) -> bool:
    """Tell whether a tier of FedHM is far below FedAvg."""
    of_row = found.get(row.key, {})
    if not {"fedhm", "fedavg"} <= of_row.keys():
        return False
    tiers, fedavg = of_row["fedhm"], of_row["fedavg"]
    return fedavg is not None and (tiers is None or min(tiers) < fedavg[0] - MARGIN)


def cell(tiers: list[float] | None) -> str:
    if tiers is None:
        return DIVERGED
    return f"{tiers[0]:.1f}" if len(tiers) == 1 else f"{tiers[0]:.1f} … {tiers[-1]:.1f}"


def mean(rows: Sequence[Row], column: str, found: Found) -> str:
    """Return the mean over all tiers and rows; a run that diverged counts as 0. Empty unless all rows are done."""
    if not all(column in found[row.key] for row in rows):
        return ""
    each = [sum(tiers) / len(tiers) if (tiers := found[row.key][column]) else 0.0 for row in rows]
    return f"{sum(each) / len(each):.1f}"


def page(rows: Sequence[Row], methods: Sequence[str], found: Found) -> str:
    """Return the table of all rows that have begun, means by data, and the rows that fail."""
    begun = [row for row in rows if row.key in found]
    lines = [f"| data | setting | {' | '.join(methods)} |", f"|---|---|{'--:|' * len(methods)}"]
    for row in begun:
        of_row = found[row.key]
        cells = [cell(of_row[method]) if method in of_row else "" for method in methods]
        lines.append(f"| {row.preset} | {row.name}{' **fails**' if fails(row, found) else ''} | {' | '.join(cells)} |")
    for preset in dict.fromkeys(row.preset for row in begun):
        of_preset = [row for row in begun if row.preset == preset]
        means = " | ".join(mean(of_preset, method, found) for method in methods)
        lines.append(f"| {preset} | mean of tiers and rows | {means} |")
    failing = [f"- {row.preset}, {row.name}" for row in begun if fails(row, found)]
    said = f"FedHM fails in {len(failing)} of {len(begun)} rows: a tier is {MARGIN:g} points or more below FedAvg."
    return "\n".join([*lines, "", said, *failing]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--markdown", type=Path, help="where the page goes, after every run")
    parser.add_argument("--presets", nargs="*", default=list(PRESETS), choices=PRESETS)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--rates", nargs="*", type=float, default=list(RATES))
    parser.add_argument("--epochs", nargs="*", type=int, default=list(EPOCHS))
    parser.add_argument("--alphas", nargs="*", default=list(ALPHAS))
    parser.add_argument(
        "--steps", nargs="*", type=float, default=[], help="FedHM's longest steps to compare; 0: no limit"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of all runs")
    parser.add_argument("--held-out", action="store_true", help="evaluate on held-out training samples")
    parser.add_argument(
        "--no-unusual", action="store_true", help="leave out the rows with unusual clients and networks"
    )
    parser.add_argument("--quick", action="store_true", help="one row of two methods: to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.presets, options.methods, options.no_unusual = ["digits"], ["fedhm", "fedavg"], True
        options.rates, options.epochs, options.alphas = [0.1], [10], ["iid"]
    rows = list(sweep(options.presets, options.rates, options.epochs, options.alphas))
    rows += [] if options.no_unusual else list(unusual(options.presets))
    found: Found = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    columns = [*map(Column, options.methods), *(Column("fedhm", step) for step in options.steps)]
    names = [str(column) for column in columns]
    for row, column in product(rows, columns):
        of_row, name = found.setdefault(row.key, {}), str(column)
        if name not in of_row:
            of_row[name] = run(row, column, options.held_out, options.set)
            print(f"{row.key}, {name}: {cell(of_row[name])}", flush=True)
            write_atomically(options.json, json.dumps(found, indent=1))
            if options.markdown:
                write_atomically(options.markdown, page(rows, names, found))
    print(page(rows, names, found))


if __name__ == "__main__":
    main()
