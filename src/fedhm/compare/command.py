"""`fedhm compare`: run what is missing of a comparison and report it, or report runs that exist."""

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console

from fedhm.compare import SPEC_FILE
from fedhm.compare.execute import Cell, Failed, all_cells, check, default_jobs, execute, settings_text
from fedhm.compare.report import ComparisonReport
from fedhm.compare.results import EntryRuns, find_run_folders, read_entries
from fedhm.compare.select import Reference, default_names, drop_duplicates, layer_costs, resolve_entries
from fedhm.compare.tuning import (
    Tuning,
    TuningResult,
    collect_tuning,
    mark_diverged,
    previously_diverged,
    read_tuning,
    shared_tuning,
)
from fedhm.config.loading import load_config
from fedhm.config.method import Change
from fedhm.config.objective import Metric
from fedhm.config.schema import Config
from fedhm.errors import FedhmError
from fedhm.machine.files import check_folder, make_folder, read_regular, write_atomically
from fedhm.report.sheets import rich_table
from fedhm.runs.folder import is_complete, read_config
from fedhm.runs.history import read_runs


@dataclass(frozen=True)
class ComparisonSpec:
    """`comparison.json`: the content of a comparison. Paths are relative to its folder."""

    command: str
    target: float | None = None
    entries: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the runs of each entry
    runs: Sequence[str] = ()  # runs that existed before, in place of entries
    declared: Mapping[str, Sequence[Change]] = field(default_factory=dict)  # of entries with settings of their own

    def save(self, out: Path) -> None:
        write_atomically(out / SPEC_FILE, json.dumps(asdict(self), indent=2) + "\n")


def relative_paths(paths: Sequence[Path], out: Path) -> list[str]:
    """Return paths relative to a comparison's folder."""
    return [os.path.relpath(path, out) for path in paths]


def read_spec(folder: Path) -> ComparisonSpec:
    """Read `comparison.json`."""
    file = folder / SPEC_FILE
    try:
        return TypeAdapter(ComparisonSpec).validate_json(read_regular(file))
    except (OSError, ValueError) as error:
        raise FedhmError(f"cannot read {file}: {error}; the comparison's own command writes it again") from None


def declared_beside(run: Path) -> Sequence[Change]:
    """Return the changes that a run's entry declares in the comparison whose folder it lies in; none without one."""
    out = run.resolve().parent
    if not (out / SPEC_FILE).exists():
        return ()
    spec = read_spec(out)
    labels = [label for label, names in spec.entries.items() if run.resolve().name in names]
    return spec.declared.get(labels[0], ()) if labels else ()


def report_from_folder(folder: Path) -> ComparisonReport:
    """Return the report of a comparison on disk, on all entries whose runs are complete."""
    spec = read_spec(folder)
    folders = {label: [folder / name for name in names] for label, names in spec.entries.items()}
    found = [
        EntryRuns(label, read_runs(own), spec.declared.get(label, ()))
        for label, own in folders.items()
        if all(map(_complete, own))
    ]
    paths = [path for own in folders.values() for path in own] or find_run_folders(
        [folder / name for name in spec.runs]
    )
    if spec.runs:
        found = read_entries(paths, declared_beside)
    if not found:
        raise FedhmError(f"no entry of the comparison in {folder} is complete: {spec.command} resumes it")
    tuned = shared_tuning(paths, found)
    return ComparisonReport(found, spec.command, layer_costs(found), spec.target, tuned)


def _complete(folder: Path) -> bool:
    return (folder / "config.toml").exists() and is_complete(folder, read_config(folder))


def compare(options: argparse.Namespace, console: Console) -> None:
    if options.runs:
        if options.config is not None:
            raise FedhmError(f"--runs takes runs that exist, and needs no preset: leave '{options.config}' out")
        for name in (
            "methods",
            "model",
            "seeds",
            "setting",
            "data",
            "jobs",
            "tune",
            "tune_rounds",
            "tune_share",
            "changes",
        ):
            if getattr(options, name):
                option = "set" if name == "changes" else name.replace("_", "-")
                raise FedhmError(f"--runs takes runs as they are: --{option} does not go with it")
        found = read_entries(options.runs, declared_beside)
        target = read_target(options.target, found[0].metric)
        tuned = shared_tuning(find_run_folders(options.runs), found)
        report = ComparisonReport(found, options.command, layer_costs(found), target, tuned)
        out = options.out or Path("comparison")
        make_folder(out)
        ComparisonSpec(options.command, target, runs=relative_paths(find_run_folders(options.runs), out)).save(out)
        _show(report, out, console)
        return
    if options.config is None:
        raise FedhmError("name a preset or a config file to compare methods on; 'fedhm presets' lists the presets")
    seeds = options.seeds or 3
    config = _config(options)
    jobs = options.jobs or default_jobs(config)
    target = read_target(options.target, config.objective.headline)
    reference = Reference(config, options.model or "")
    names = (
        [n.strip() for n in options.methods.split(",") if n.strip()] if options.methods else default_names(reference)
    )
    entries, duplicates = drop_duplicates(resolve_entries(names, reference))
    for label, same in duplicates.items():
        console.print(f"{label} is left out: with these settings it is the same as {same}", highlight=False)
    out = options.out or _default_folder(options.config, config)
    check_folder(out)
    tuning, tuned = _tuning(options), None
    options.resume_hint = "; the same command resumes what is missing"
    if tuning:
        shorter, _ = drop_duplicates(
            resolve_entries(names, reference.with_rounds(tuning.rounds or config.train.rounds))
        )
        tuning_runs = tuning.cells(config, shorter, out, jobs)
        tuning.check(config, entries, seeds, out, tuning_runs)
        tuned = _tuned(tuning, tuning_runs, out, jobs, console)
        entries = [replace(entry, changes=tuned.best_settings(entry.label)) for entry in entries]
    planned = all_cells(config, entries, seeds, out, jobs)
    check(planned)
    make_folder(out)
    ComparisonSpec(
        options.command,
        target,
        {e.label: [c.name for c in planned if c.entry is e] for e in entries},
        declared={e.label: e.declared for e in entries if e.declared},
    ).save(out)
    failures = run_missing(planned, "runs", out, jobs, console)
    if complete := complete_entries(planned):
        _show(ComparisonReport(complete, options.command, reference.layers(), target, tuned), out, console)
    if failures:
        raise FedhmError("\n".join(failed.sentence for failed in failures))


def rewrite_report(options: argparse.Namespace, console: Console) -> None:
    """Write the report of a comparison on disk again."""
    (folder,) = options.folders
    make_folder(options.out or folder)
    _show(report_from_folder(folder), options.out or folder, console)


def _tuning(options: argparse.Namespace) -> Tuning | None:
    if options.tune:
        return read_tuning(options.tune, options.tune_share, options.tune_rounds)
    for name, given in (("rounds", options.tune_rounds), ("share", options.tune_share)):
        if given is not None:
            raise FedhmError(f"--tune-{name} needs --tune KEY=A,B,…: name the setting to tune")
    return None


def _tuned(tuning: Tuning, tuning_runs: Sequence[Cell], out: Path, jobs: int, console: Console) -> TuningResult:
    """Run the tuning runs and save their results."""
    make_folder(out)
    before = previously_diverged(tuning_runs)
    left = [cell for cell in tuning_runs if cell not in [failed.cell for failed in before]]
    failures = run_missing(left, "tuning runs", out, jobs, console)
    mark_diverged(failed for failed in failures if failed.diverged)
    if broken := [failed.sentence for failed in failures if not failed.diverged]:
        raise FedhmError("\n".join(broken))
    tuned = collect_tuning(tuning, tuning_runs, [*before, *failures])
    tuned.save(out)
    tuned.check()
    for label in tuned.tried:
        console.print(
            f"chosen for {label}: {settings_text(tuned.best_settings(label))}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    return tuned


def run_missing(planned: Sequence[Cell], called: str, out: Path, jobs: int, console: Console) -> list[Failed]:
    """Run the cells that are not complete, several at a time, and return those that failed."""
    missing = sum(not cell.complete for cell in planned)
    if missing:
        at_a_time = f"{min(jobs, missing)} at a time"
        said = f"{missing} of {len(planned)} {called} to do in {out}, {at_a_time}"
        console.print(said, highlight=False, soft_wrap=True, markup=False)
    return execute(planned, jobs, console)


def _show(report: ComparisonReport, out: Path, console: Console) -> None:
    metric = report.comparison.metric.name
    for sheet in report.sheets:
        if metric in sheet.columns and len(sheet.split(console.width)) > 1:
            sheet = sheet.without(metric)  # the table above has it
        for part in sheet.split(console.width):
            console.print(rich_table(part))
        console.print(sheet.note + "\n", highlight=False, markup=False)
    if not report.reached:
        console.print(f"What a target {metric} costs is relative to the full model: add fedavg to see it.")
    for path in report.save(out):
        console.print(str(path), highlight=False, soft_wrap=True, markup=False)


def read_target(text: str | None, metric: Metric) -> float | None:
    """Read --target: a value of the metric, as records have it."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    article = "an" if metric.name[0] in "aeiou" else "a"
    wanted = f"{article} {metric.name} between 0 and 1" if metric.percent else f"a value of {metric.name}"
    if not (0 < value < 1 if metric.percent else math.isfinite(value)):
        raise FedhmError(f"--target takes {wanted}, such as 0.9, not '{text[:80]}'")
    return value


def _config(options: argparse.Namespace) -> Config:
    changes = list(options.changes)
    if options.data is not None:
        changes.append(f"data.partition={options.data}")
    if options.setting is None:
        config = load_config(options.config, changes)
    else:
        config = config_in_setting(options.config, changes, options.setting)
    return config.without_model() if options.model else config


def config_in_setting(name: str, changes: Sequence[str], setting: str) -> Config:
    """Read a config with fixed or dynamic tiers, and the settings that the method's authors use with them.

    A change of such a setting is preferred to the authors'.
    """
    changes = [*changes, f"federation.heterogeneity={setting}"]
    config = load_config(name, changes)
    asked_for = {change.partition("=")[0].strip() for change in changes}
    fitting = {f"method.{key}": value for key, value in config.method.in_setting(setting).items()}
    changes += [f"{key}={json.dumps(value)}" for key, value in fitting.items() if key not in asked_for]
    return load_config(name, changes)


def _default_folder(name: str, config: Config) -> Path:
    assert config.data is not None  # load_config requires it
    return Path("runs") / f"compare-{Path(name).stem}-{config.federation.heterogeneity}-{config.data.partition}"


def complete_entries(planned: Sequence[Cell]) -> list[EntryRuns]:
    """Return the entries whose runs are all complete."""
    compared: list[EntryRuns] = []
    for label in dict.fromkeys(cell.entry.label for cell in planned):
        own = [cell for cell in planned if cell.entry.label == label]
        if all(cell.complete for cell in own):
            compared.append(EntryRuns(label, read_runs([cell.folder for cell in own]), own[0].entry.declared))
    return compared
