"""Writing `report.html`."""

from collections.abc import Sequence
from pathlib import Path

from fedhm.machine.files import write_atomically
from fedhm.report.page.html import body, page
from fedhm.report.page.sections import Section, Switch, run_sections
from fedhm.runs.history import Run

FILE = "report.html"


def save_page(runs: Sequence[Run], folder: Path) -> Path:
    """Write the page of runs, and return its path."""
    write_atomically(folder / FILE, page(title_of(runs), run_sections(runs), switches(runs)))
    return folder / FILE


def save_sections(title: str, sections: Sequence[Section], names: Sequence[Switch], folder: Path) -> Path:
    """Write a page of other sections, and return its path."""
    write_atomically(folder / FILE, page(title, sections, names))
    return folder / FILE


def live_page(runs: Sequence[Run]) -> str:
    """Return the page of runs that go on, which asks for news by itself."""
    return page(title_of(runs), run_sections(runs), switches(runs), live=True)


def live_body(runs: Sequence[Run]) -> str:
    """Return the part of that page that changes."""
    return body(title_of(runs), run_sections(runs), switches(runs))


def title_of(runs: Sequence[Run]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def switches(runs: Sequence[Run]) -> list[Switch]:
    """Return what can be turned off on the page."""
    tiers = dict.fromkeys(tier for run in runs for tier in run.tiers)
    return [Switch("tier", "Tiers", list(tiers)), Switch("run", "Runs", [run.name for run in runs])]
