"""`fedhm compare`: several methods on one setting, or runs that exist, in one table."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedhm.compare.cells import Cell, cells, check
from fedhm.compare.compared import Compared, existing
from fedhm.compare.entries import entries as entries_of
from fedhm.compare.entries import known
from fedhm.compare.execute import execute
from fedhm.compare.page import ComparisonReport
from fedhm.compare.reference import Reference
from fedhm.config.arguments import number, one_of, whole_number
from fedhm.config.objective import Metric
from fedhm.config.reading import load_config
from fedhm.config.settings import Config
from fedhm.errors import FedhmError
from fedhm.machine.cores import usable_cores
from fedhm.measure.cost import LayerCost
from fedhm.report.sheets import rich_table
from fedhm.runs.history import read_runs

METHODS = "fedhm,heterofl,splitmix,fedavg,lowrank,slimmed"
DESCRIPTION = """\
Runs several methods on the same data with the same seeds and prints the paper's table: a row for each capability
level, accuracy or another headline metric as mean ± deviation over the seeds. The same command again runs only what is
missing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", metavar="A,B,…", help=f"of {', '.join(known())} (default: {METHODS})")
    parser.add_argument(
        "--seeds", type=whole_number("--seeds"), metavar="N", help="how many, from the config's seed on (default: 3)"
    )
    parser.add_argument(
        "--setting",
        type=one_of("--setting", "fixed", "dynamic"),
        metavar="fixed|dynamic",
        help="clients keep their tier, or draw one every round",
    )
    parser.add_argument(
        "--data",
        type=one_of("--data", "iid", "dirichlet"),
        metavar="iid|dirichlet",
        help="how the samples are dealt out to the clients",
    )
    parser.add_argument(
        "--target",
        metavar="VALUE",
        help="an accuracy, or a value of another headline metric: what it costs to get there (default: what all reach)",
    )
    parser.add_argument(
        "--jobs",
        type=whole_number("--jobs"),
        metavar="N",
        help="runs side by side (default: one for each usable core)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/compare-PRESET-SETTING-DATA")
    parser.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="compare runs that exist (default --out: comparison)",
    )


def compare(options: argparse.Namespace, console: Console) -> None:
    if options.runs:
        if options.config is not None:
            raise FedhmError(f"--runs takes runs that exist, and needs no preset: leave '{options.config}' out")
        for name in ("methods", "seeds", "setting", "data", "jobs", "changes"):
            if getattr(options, name):
                option = "set" if name == "changes" else name
                raise FedhmError(f"--runs takes runs as they are: --{option} does not go with it")
        entries = existing(options.runs)
        target = _target(options, entries[0].metric)
        report = ComparisonReport(entries, options.command, _layers(entries), target)
        _show(report, options.out or Path("comparison"), console)
        return
    if options.config is None:
        raise FedhmError("name a preset or a config file to compare methods on; 'fedhm presets' lists the presets")
    seeds, jobs = options.seeds or 3, options.jobs or usable_cores()
    config = _config(options)
    target = _target(options, config.objective.headline)
    reference = Reference(config)
    chosen = entries_of([name.strip() for name in (options.methods or METHODS).split(",") if name.strip()], reference)
    out = options.out or _default_folder(options.config, config)
    planned = cells(config, chosen, seeds, out, jobs)
    check(planned)
    _make(out)
    missing = sum(not cell.complete for cell in planned)
    if missing:
        at_a_time = f"{min(jobs, missing)} at a time"
        console.print(f"{missing} of {len(planned)} runs to do in {out}, {at_a_time}", highlight=False, soft_wrap=True)
    options.resume_hint = "; the same command resumes what is missing"
    failures = execute(planned, jobs, console)
    if complete := _complete(planned):
        _show(ComparisonReport(complete, options.command, reference.layers(), target), out, console)
    if failures:
        raise FedhmError("\n".join(failures))


def _layers(entries: Sequence[Compared]) -> dict[str, dict[str, LayerCost]]:
    """Return costs of the model that a config names; nothing where it was handed over in Python."""
    configs = [entry.first.config for entry in entries if entry.first.config.model and entry.first.config.data]
    configs.sort(key=lambda config: not config.method.rank_ratios)  # whose tiers are the ones to show
    return Reference(configs[0]).layers() if configs else {}


def _show(report: ComparisonReport, out: Path, console: Console) -> None:
    metric = report.comparison.metric.name
    for sheet in report.sheets:
        if metric in sheet.columns and len(sheet.split(console.width)) > 1:
            sheet = sheet.without(metric)  # stands in the table above
        for part in sheet.split(console.width):
            console.print(rich_table(part))
        console.print(sheet.note + "\n", highlight=False)
    if not report.reached:
        console.print(f"What a target {metric} costs is relative to the full model: add fedavg to see it.")
    for path in report.save(out):
        console.print(str(path), highlight=False, soft_wrap=True)


def _target(options: argparse.Namespace, metric: Metric) -> float | None:
    if options.target is None:
        return None
    if not metric.percent:
        return number("--target", f"a value of {metric.name}, such as 0.9")(options.target)
    share = f"{'an' if metric.name[0] in 'aeiou' else 'a'} {metric.name} between 0 and 1, such as 0.9"
    return number("--target", share, above=0, below=1)(options.target)


def _config(options: argparse.Namespace) -> Config:
    changes = list(options.changes)
    if options.data is not None:
        changes.append(f"data.partition={options.data}")
    if options.setting is None:
        return load_config(options.config, changes)
    changes.append(f"federation.heterogeneity={options.setting}")
    config = load_config(options.config, changes)
    asked_for = {change.partition("=")[0].strip() for change in changes}
    fitting = {f"method.{key}": value for key, value in config.method.in_setting(options.setting).items()}
    changes += [f"{key}={json.dumps(value)}" for key, value in fitting.items() if key not in asked_for]
    return load_config(options.config, changes)


def _default_folder(name: str, config: Config) -> Path:
    assert config.data is not None  # load_config sees to that
    return Path("runs") / f"compare-{Path(name).stem}-{config.federation.heterogeneity}-{config.data.partition}"


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedhmError(f"cannot make the folder {out}: {error.strerror}") from None


def _complete(planned: Sequence[Cell]) -> list[Compared]:
    """Return the entries whose runs are all there."""
    compared: list[Compared] = []
    for label in dict.fromkeys(cell.entry.label for cell in planned):
        own = [cell for cell in planned if cell.entry.label == label]
        if all(cell.complete for cell in own):
            compared.append(Compared(label, read_runs([cell.folder for cell in own])))
    return compared
