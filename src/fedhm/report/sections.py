"""The content of the page of runs: its sections, in order, as sentences, plots and tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fedhm.config.objective import Metric
from fedhm.report.comparable import find_difference
from fedhm.report.plot import MAX_TABLE_ROWS, Plot
from fedhm.report.plots import (
    client_plot,
    describe_cut,
    energy_plot,
    epsilon_plot,
    layer_plot,
    metric_plots,
    participation_plot,
    theory_plots,
)
from fedhm.report.sheets import Sheet
from fedhm.report.tables import client_sheet, run_sheet, time_sheet
from fedhm.runs.history import Run

Part = str | Plot | Sheet


@dataclass(frozen=True)
class Section:
    """A heading with sentences, plots and tables below it."""

    heading: str
    parts: Sequence[Part]
    folded: bool = False  # readers open it


@dataclass(frozen=True)
class Switch:
    """Boxes at the top of the page. Each hides the lines whose `kind`, run or tier, has that name."""

    kind: str
    label: str
    names: Sequence[str]


def run_sections(runs: Sequence[Run]) -> list[Section]:
    """Return the sections of runs. Those without content are left out."""
    evaluated = [run for run in runs if run.evaluated]
    sections = [
        Section("Rounds", [_state(run) for run in runs]),
        Section("Tiers", _tiers(evaluated)),
        *_metric_sections(evaluated),
        Section("At the clients", _clients(evaluated)),
        Section("Spectrum", _known([energy_plot(runs)])),
        Section("Theory", theory_plots(runs)),
        Section("Privacy", _known([epsilon_plot(runs)])),
        Section("Who took part", _participation([run for run in runs if run.records])),
        Section("Layers", _layers(runs)),
        Section("Settings", [_settings_sheet(runs)]),
    ]
    return [section for section in sections if section.parts]


def _state(run: Run) -> str:
    done, rounds = len(run.records), run.config.train.rounds
    stopped = run.records[-1].stopped if run.records else ""
    if stopped:
        return f"{run.name} stopped after round {done} of {rounds}: {stopped}."
    if done >= rounds:
        return f"{run.name} has done {f'all of its {rounds} rounds' if rounds > 1 else 'its only round'}."
    return f"{run.name} has done {done} of its {rounds} rounds."


def _tiers(runs: Sequence[Run]) -> list[Part]:
    if not runs:
        return ["No round has been evaluated yet."]
    found = find_difference(runs)
    return [run_sheet(runs), *([f"Not comparable: {found}."] if found else [])]


def _metric_sections(runs: Sequence[Run]) -> list[Section]:
    """Return a section for each metric, headlines first; the others are folded."""
    headlines = [run.config.objective.headline for run in runs]
    others = [metric for run in runs for metric in run.config.objective.reported]

    def section(metric: Metric) -> Section:
        plots = [plot for plot in metric_plots(runs, metric).values() if plot.lines]
        return Section(metric.name.capitalize(), plots, folded=metric not in headlines)

    return [section(metric) for metric in dict.fromkeys([*headlines, *others])]


def _clients(runs: Sequence[Run]) -> list[Part]:
    return _known(part for run in runs for part in (client_plot(run, runs), client_sheet(run)))


def _participation(runs: Sequence[Run]) -> list[Part]:
    parts: list[Part] = []
    for run in runs:
        parts += _known([participation_plot(run, runs), time_sheet(run)])
        sheets = (_dropped_sheet(run), _cut_sheet(run))
        parts += [replace(sheet, title=f"{sheet.title}, {run.name}") for sheet in sheets if sheet]
    return parts


def _dropped_sheet(run: Run) -> Sheet | None:
    """Return the answers that were not merged, with the reasons; None if there are none."""
    rows = [
        [
            f"{record.round}",
            f"{entry['client']}",
            str(entry.get("tier", "")),
            str(entry.get("kind", "")),
            str(entry.get("reason", "")),
        ]
        for record in run.records
        for entry in record.dropped
    ]
    return _sheet_of_answers("Dropped", ["round", "client", "tier", "work", "why"], rows)


def _cut_sheet(run: Run) -> Sheet | None:
    """Return the updates that were cut to a bound; None if there are none."""
    rows = [
        [
            f"{record.round}",
            f"{entry['client']}",
            str(entry.get("tier", "")),
            str(entry.get("part", "")),
            describe_cut(entry),
        ]
        for record in run.records
        for entry in record.clipped
    ]
    return _sheet_of_answers("Cut to a bound", ["round", "client", "tier", "part", "how"], rows)


def _sheet_of_answers(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Sheet | None:
    if not rows:
        return None
    too_many = len(rows) > MAX_TABLE_ROWS
    note = f"The last {MAX_TABLE_ROWS} of {len(rows):,}; records.jsonl has all of them." if too_many else ""
    return Sheet(columns, [rows[-MAX_TABLE_ROWS:]], left=5, title=title, note=note, numbers=("round", "client"))


def _layers(runs: Sequence[Run]) -> list[Part]:
    """Return the layers of each network once: runs with the same networks share a plot."""
    parts: list[Part] = []
    shown: dict[str, str] = {}
    for run in runs:
        same = shown.get(repr(run.layers))
        if run.layers and same:
            parts.append(f"{run.name} has the same networks as {same}.")
        elif plot := layer_plot(run, runs):
            parts.append(plot)
            shown[repr(run.layers)] = run.name
        else:
            parts.append(f"The layers of {run.name} stand here once its models are written, after its last round.")
    return parts


def _settings_sheet(runs: Sequence[Run]) -> Sheet:
    """Return a row for each setting, those that differ first and in bold. A private run's secret is not a setting."""
    settings = [{key: str(value) for key, value in run.config.dotted().items()} for run in runs]
    keys = list(dict.fromkeys(key for own in settings for key in own))
    differing = [key for key in keys if len({own.get(key) for own in settings}) > 1]
    same = [key for key in keys if key not in differing]
    rows = [
        [[key, *(_setting_cell(own.get(key), bold=key in differing) for own in settings)] for key in group]
        for group in (differing, same)
        if group
    ]
    note = "Settings that differ between the runs are in bold." if len(runs) > 1 else ""
    columns = ["setting", *(run.name for run in runs)]
    return Sheet(columns, rows, left=len(columns), title="", note=note)


def _setting_cell(value: str | None, *, bold: bool) -> str:
    text = "–" if value is None else value or "(empty)"
    return f"**{text}**" if bold else text


def _known(parts: Iterable[Part | None]) -> list[Part]:
    return [part for part in parts if part is not None]
