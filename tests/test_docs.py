"""The docs are true: settings are all described, links lead somewhere, examples run."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import fedhm
from fedhm.cli import make_parser
from fedhm.config.loading import _known_keys
from fedhm.config.registry import known

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


def test_every_setting_is_described_with_its_section() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    for method, objective in product(known("methods"), known("objectives")):
        for key in _known_keys({"method": {"name": method}, "objective": {"name": objective}}):
            section, _, name = key.rpartition(".")
            if section:
                start = text.index(f"## [{section}]")
                end = text.find("\n## ", start + 1)
                assert f"`{name}" in text[start : end if end > 0 else None], key


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_are_there(page: Path) -> None:
    targets = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", page.read_text())
    for link, picture in targets:
        target = (link or picture).partition("#")[0]
        if target and "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    ("page", "count", "made"),
    [
        ("README.md", 1, {"result", "small"}),
        ("docs/quickstart.md", 3, {"result", "plan", "small", "state", "cost", "done"}),
    ],
)
def test_the_first_examples_run(
    page: str, count: int, made: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert len(blocks) == count
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert made <= names.keys()


def test_the_readme_is_two_screens_and_keeps_its_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 115
    assert {line.split("#")[0].strip() for line in lines} >= {"make demo", "make test"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_is_installed_from_a_registry_that_does_not_have_it(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"(pip|uv) (pip )?install[^`\n]*['\" ]fedhm(\[|['\" `]|$)", text, flags=re.MULTILINE)


def test_the_exports_example_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), flags=re.DOTALL)
    exec(compile(block, "docs/export.md", "exec"), {})
    assert (tmp_path / "exported" / "model.pt2").exists()


def test_the_example_of_devices_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "devices.md").read_text(), flags=re.DOTALL)
    model = fedhm.models.MODELS["cnn"](num_classes=10, in_channels=3, width=0.25)
    names: dict[str, Any] = {"fedhm": fedhm, "model": model}
    exec(compile(block, "docs/devices.md", "exec"), names)
    assert names["found"].expected.memory <= 128e6


def test_every_name_has_its_place_in_the_reference() -> None:
    named = re.findall(r"^::: (fedhm\S+)\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), flags=re.MULTILINE)
    own = [(module, name) for module, name in named if module != "fedhm.tracking"]
    for module, name in own:
        assert getattr(import_module(module), name) is getattr(fedhm, name)
    assert {name for _, name in own} == set(fedhm.__all__) - {"models", "tracking"}
    assert {name for pair in named if pair not in own for name in pair[1:]} == set(fedhm.tracking.__all__)


def argument_rows(table: str) -> list[tuple[list[str], str]]:
    """Return the names and the default of each row of a table of arguments."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line[:3] == "| `"]
    head = next(line for line in table.splitlines() if line.startswith("| argument"))
    column = [cell.strip() for cell in head.strip("|").split(" | ")].index("default")
    return [(re.findall(r"`(\w+)`", row[0]), row[column]) for row in rows]


def written_default(parameter: inspect.Parameter) -> str | None:
    """Return how a table writes the default of an argument; None if it says in words what None stands for."""
    default = parameter.default
    if default is inspect.Parameter.empty:
        return "required"
    if default is None:
        return None
    if isinstance(default, bool):
        return str(default).lower()
    return "none" if default == () else f'`"{default}"`' if isinstance(default, str) else str(default)


def check_arguments(table: str, function: Callable[..., object]) -> None:
    """Assert that a table has the arguments of a function, in their order and with their defaults."""
    parameters = inspect.signature(function).parameters
    rows = argument_rows(table)
    assert [name for names, _ in rows for name in names] == list(parameters)
    for names, cell in rows:
        cells = cell.split(", ") if len(names) > 1 and ", " in cell else [cell] * len(names)
        for name, default in zip(names, cells, strict=True):
            expected = written_default(parameters[name])
            literal = re.fullmatch(r"required|true|false|-?[\d.]+|`.*`", default)
            assert (not literal) if expected is None else default == expected, f"{name}: {default}, not {expected}"


@pytest.mark.parametrize("name", ["run", "resume", "prepare", "plan_ranks", "fit", "training_memory", "export"])
def test_arguments_stand_in_a_table_with_their_defaults(name: str) -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    start = re.search(rf"^::: fedhm\S+\.{name}$", text, flags=re.MULTILINE)
    assert start is not None
    check_arguments(text[start.end() : text.index("\n::: ", start.end())], getattr(fedhm, name))


def test_arguments_of_the_apps_stand_in_tables() -> None:
    from fedhm.flower.clients import client_app
    from fedhm.flower.server import server_app

    text = (ROOT / "docs" / "reference.md").read_text()
    for app in (client_app, server_app):
        table = text[text.index(f"| argument of `{app.__name__}`") :].partition("\n\n")[0]
        check_arguments(table, app)


def test_every_verb_has_its_line() -> None:
    (verbs,) = (action.choices for action in make_parser()._actions if isinstance(action.choices, dict))
    text = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"| `fedhm {verb}" in text for verb in verbs)
    assert len(verbs) > 10


def test_every_page_is_in_the_sites_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = set(re.findall(r"([\w-]+\.md)$", menu, flags=re.MULTILINE))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "plan_ranks" in (tmp_path / "reference.html").read_text()
    asked = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"https?://")
    assert [page.name for page in tmp_path.glob("*.html") if asked.search(page.read_text())] == []  # no other host
