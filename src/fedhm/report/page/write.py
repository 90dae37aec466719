"""The page as one file: everything it shows is in it, and its own rules let it fetch nothing."""

import hashlib
import re
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, Template
from markupsafe import Markup, escape

from fedhm.machine.files import write_atomically
from fedhm.report.page.interactive import figure
from fedhm.report.page.plot import Plot
from fedhm.report.page.still import picture
from fedhm.report.sections import Section, Switch, run_sections
from fedhm.report.sheets import BOLD, Sheet
from fedhm.runs.history import Run

LIBRARY = "plotly-basic.min.js"


def page(title: str, sections: Sequence[Section], switches: Sequence[Switch], *, live: bool = False) -> str:
    """Return the whole page; `switches` are what can be turned off on it."""
    scripts = [_asset(LIBRARY), _asset("page.js")]
    return _template("page.html.jinja").render(
        title=title,
        body=body(title, sections, switches),
        css=Markup(_asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        rules=_rules(scripts, live),
        live=live,
    )


def body(title: str, sections: Sequence[Section], switches: Sequence[Switch]) -> Markup:
    """Return what changes while a run goes on: all but styles and scripts."""
    plots = [part for section in sections for part in section.parts if isinstance(part, Plot)]
    rendered = _template("body.html.jinja").render(
        title=title,
        sections=sections,
        switches=[switch for switch in switches if len(switch.names) > 1],
        figures={plot.key: figure(plot) for plot in plots},
        is_plot=lambda part: isinstance(part, Plot),
        is_sheet=lambda part: isinstance(part, Sheet),
        picture=lambda plot: Markup(picture(plot)),
        cell=_cell,
    )
    return Markup(rendered)


def _cell(text: str) -> Markup:
    """Return a table's cell, its **bold** parts as such: only after everything in it is escaped."""
    return Markup(BOLD.sub(r"<strong>\1</strong>", str(escape(text))))


def _rules(scripts: Sequence[str], live: bool) -> str:
    """Return which scripts may run, by their digests, so that nothing that slipped in does; and what may be fetched."""
    digests = " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    fetched = "connect-src 'self'; " if live else ""
    return f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; {fetched}img-src data: blob:"


@cache
def _asset(name: str) -> str:
    return (resources.files("fedhm.report.page") / "assets" / name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["slug"] = lambda text: re.sub(r"\W+", "-", text.lower())
    return environment.from_string(_asset(name))


# Writing `report.html`.

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
