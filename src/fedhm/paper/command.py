"""`fedhm paper NAME`: run what is missing of a table or figure, and report it beside the paper's numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console

from fedhm.compare.command import complete_entries, read_target, run_missing
from fedhm.compare.execute import Cell, check, default_jobs, plan_cells
from fedhm.compare.select import Entry, Reference, resolve_entries
from fedhm.config.schema import Config
from fedhm.errors import FedhmError
from fedhm.machine.files import check_folder, file_name, make_folder
from fedhm.paper.artifacts import KERNEL, Artifact, Column, Setting, Trained, find_artifact
from fedhm.paper.estimate import estimate_sheet
from fedhm.paper.numbers import DataName, PartitionName
from fedhm.paper.report import ColumnRuns, PaperReport, RunsReport, print_paths
from fedhm.paper.scale import ScaleName, paper_config
from fedhm.paper.untrained import UntrainedReport
from fedhm.report.sheets import rich_table


@dataclass(frozen=True)
class PaperOptions:
    """The options of `fedhm paper NAME`. None: not given."""

    name: str
    command: str  # as it was written, for files
    data: DataName | None = None
    partition: PartitionName | None = None
    scale: ScaleName = "paper"
    seeds: int | None = None
    jobs: int | None = None
    methods: tuple[str, ...] = ()  # keys of columns
    target: str | None = None
    out: Path = Path("runs/paper")
    changes: tuple[str, ...] = ()
    estimate: bool = False


@dataclass(frozen=True)
class Study:
    """The runs of a table or figure. Runs of the same setting share a folder, so tables and figures share runs."""

    columns: tuple[Column, ...]
    data: DataName
    partition: PartitionName
    scale: ScaleName
    changes: tuple[str, ...]
    seeds: int
    jobs: int | None  # None: one for each accelerator or core
    out: Path

    @cached_property
    def entries(self) -> dict[Trained, list[Entry]]:
        """Return the entries that each of the columns' runs stands for."""
        references = {setting: Reference(config) for setting, config in self.configs.items()}
        return {trained: _entries(trained, references[trained.setting]) for trained in self._trained}

    @property
    def at_a_time(self) -> int:
        return self.jobs or default_jobs(next(iter(self.configs.values())))

    @cached_property
    def configs(self) -> dict[Setting, Config]:
        settings = dict.fromkeys(trained.setting for trained in self._trained)
        return {
            setting: paper_config(self.data, self.partition, setting, self.scale, self.changes) for setting in settings
        }

    @cached_property
    def cells(self) -> list[Cell]:
        """Return all runs, seed by seed and in the order of the columns, each once."""
        wanted = [
            (trained.setting, entry, seed)
            for seed in range(self.seeds)
            for trained in self._trained
            for entry in self.entries[trained]
        ]
        return [self._cell(*each, number, len(wanted)) for number, each in enumerate(wanted)]

    def _cell(self, setting: Setting, entry: Entry, seed_number: int, number: int, of: int) -> Cell:
        config = self.configs[setting]
        seed = config.seed + seed_number
        name = f"{self.folder(setting)}/{file_name(entry.label)}-seed{seed}"
        (cell,) = plan_cells(config, [(entry, seed, name)], self.out, self.at_a_time, of - 1, number)
        return cell

    def folder(self, setting: Setting) -> str:
        return "-".join([setting, self.data, self.partition, *(["small"] if self.scale == "small" else [])])

    @property
    def _trained(self) -> list[Trained]:
        return list(dict.fromkeys(trained for column in self.columns for trained in column.runs))

    def results(self) -> list[ColumnRuns]:
        """Return the columns with the entries whose runs are complete."""
        found = {runs.label: runs for runs in complete_entries(self.cells)}
        return [
            ColumnRuns(column, [found.get(e.label) for trained in column.runs for e in self.entries[trained]])
            for column in self.columns
        ]


def _entries(trained: Trained, reference: Reference) -> list[Entry]:
    if trained.rank_is_kernel:
        (half,) = resolve_entries([f"{trained.name}:1/2"], reference)  # its ranks are at least k, and cut to k
        return [Entry(f"{trained.name}-rank-k", {**half.method, "keep": 0, "max_rank": KERNEL})]
    found = resolve_entries([trained.name], reference)
    return found[-1:] if trained.smallest else found


def reproduce(options: PaperOptions, console: Console) -> str:
    """Run what is missing of a table or figure, print it and write its files.

    Return why some runs failed, one sentence a line; empty if all went well.
    """
    artifact = find_artifact(options.name, options.data)
    check_folder(options.out)
    if not artifact.needs_runs:
        _refuse_run_options(artifact, options)
        untrained = UntrainedReport(
            *(artifact, options.data, options.scale, options.changes),
            stem="-".join([artifact.name, *([options.data] if options.data else []), *_suffix(options.scale)]),
            command=options.command,
        )
        _finish(untrained.report(), options.out, console)
        return ""
    if options.target is not None and artifact.kind != "target":
        raise FedhmError(f"--target is for figure4: {artifact.name} has no target accuracy")
    study = Study(
        columns=artifact.choose(options.methods),
        data=options.data or artifact.data[0],
        partition=options.partition or "iid",
        scale=options.scale,
        changes=options.changes,
        seeds=options.seeds or 1,
        jobs=options.jobs,
        out=options.out,
    )
    target = read_target(options.target, next(iter(study.configs.values())).objective.headline)
    if options.estimate:
        sheet = estimate_sheet(study.cells, study.data, study.at_a_time, console)
        console.print(rich_table(sheet, spacious=True))
        return ""
    check(study.cells)
    make_folder(options.out)
    failures = run_missing(study.cells, "runs", options.out, study.at_a_time, console)
    results = study.results()
    if any(entry is not None for column in results for entry in column.entries):
        stem = "-".join([artifact.name, study.data, study.partition, *_suffix(study.scale)])
        made_of = RunsReport(
            *(artifact, study.data, study.partition, study.scale, results),
            stem=stem,
            command=options.command,
            given_target=target,
        )
        _finish(made_of.report(), options.out, console)
    return "\n".join(failed.sentence for failed in failures)


def _suffix(scale: ScaleName) -> Sequence[str]:
    return ["small"] if scale == "small" else []


def _refuse_run_options(artifact: Artifact, options: PaperOptions) -> None:
    """Refuse options that say how to run, for a table or figure without runs."""
    given = {
        "partition": options.partition,
        "seeds": options.seeds,
        "jobs": options.jobs,
        "methods": options.methods,
        "target": options.target,
        "estimate": options.estimate,
    }
    for name, value in given.items():
        if value:
            raise FedhmError(f"{artifact.name} trains nothing: leave --{name} out")


def _finish(report: PaperReport, out: Path, console: Console) -> None:
    make_folder(out)
    report.show(console)
    print_paths(report.save(out), console)
