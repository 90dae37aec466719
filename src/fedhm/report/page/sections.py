"""What stands on the page of one or several runs, in its order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fedhm.report.client_table import client_sheet
from fedhm.report.comparable import difference
from fedhm.report.fleet_table import time_sheet
from fedhm.report.page.content.at_clients import at_each_client
from fedhm.report.page.content.by_round import privacy, spectrum
from fedhm.report.page.content.curves import curves, metrics_of
from fedhm.report.page.content.layers import parameters_by_layer
from fedhm.report.page.content.settings import settings_sheet
from fedhm.report.page.content.taking_part import cut_sheet, dropped_sheet, who_took_part
from fedhm.report.page.plot import Plot
from fedhm.report.sheets import Sheet
from fedhm.report.tables import sheet
from fedhm.runs.history import Run

Part = str | Plot | Sheet


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it: sentences, plots and tables."""

    heading: str
    parts: Sequence[Part]
    folded: bool = False  # for who opens it


@dataclass(frozen=True)
class Switch:
    """What can be turned off on the page: lines whose `kind`, run or tier, has one of these names."""

    kind: str
    label: str
    names: Sequence[str]


def run_sections(runs: Sequence[Run]) -> list[Section]:
    """Return the sections of runs, those that have something to tell."""
    evaluated = [run for run in runs if run.evaluated]
    sections = [
        Section("Rounds", [_state(run) for run in runs]),
        Section("Tiers", _tiers(evaluated)),
        *_metric_sections(evaluated),
        Section("At the clients", _at_clients(evaluated)),
        Section("Spectrum", _known([spectrum(runs)])),
        Section("Privacy", _known([privacy(runs)])),
        Section("Who took part", _taking_part([run for run in runs if run.records])),
        Section("Layers", _layers(runs)),
        Section("Settings", [settings_sheet(runs)]),
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
    found = difference(runs)
    return [sheet(runs), *([f"Not comparable: {found}."] if found else [])]


def _metric_sections(runs: Sequence[Run]) -> list[Section]:
    headlines = {run.config.objective.headline for run in runs}
    return [Section(m.name.capitalize(), curves(runs, m), folded=m not in headlines) for m in metrics_of(runs)]


def _at_clients(runs: Sequence[Run]) -> list[Part]:
    return _known(part for run in runs for part in (at_each_client(run, runs), client_sheet(run)))


def _taking_part(runs: Sequence[Run]) -> list[Part]:
    parts: list[Part] = []
    for run in runs:
        devices = _known([time_sheet(run)])
        parts += [who_took_part(run, runs), *devices, *_of(run, dropped_sheet(run), cut_sheet(run))]
    return parts


def _of(run: Run, *sheets: Sheet | None) -> list[Sheet]:
    return [replace(each, title=f"{each.title}, {run.name}") for each in sheets if each]


def _layers(runs: Sequence[Run]) -> list[Part]:
    """Return the layers of each network once: runs of the same networks share a plot."""
    parts: list[Part] = []
    shown: dict[str, str] = {}
    for run in runs:
        same = shown.get(repr(run.layers))
        if run.layers and same:
            parts.append(f"{run.name} has the same networks as {same}.")
        elif plot := parameters_by_layer(run, runs):
            parts.append(plot)
            shown[repr(run.layers)] = run.name
        else:
            parts.append(f"The layers of {run.name} stand here once its models are written, after its last round.")
    return parts


def _known(parts: Iterable[Part | None]) -> list[Part]:
    return [part for part in parts if part is not None]
