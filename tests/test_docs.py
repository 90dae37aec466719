"""The docs are true: settings are all described, links lead somewhere, examples run."""

import re
import shlex
import subprocess
import sys
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import fedhm
from fedhm.cli import make_parser
from fedhm.config.loading import _known_keys, presets
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


def test_the_readmes_examples_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert {"result", "small", "state"} <= names.keys()


def test_presets_named_in_the_docs_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"fedhm (?:run|sizes|compare) ([a-z][\w-]+)", page.read_text()):
            assert name in presets(), (page.name, name)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_can_be_written_like_that(page: Path) -> None:
    blocks = re.findall(r"```(?:sh|bash|console)?\n(.*?)```", page.read_text(), flags=re.DOTALL)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        if line.startswith("fedhm ") and "…" not in line:
            words = shlex.split(line, comments=True)[1:]
            if "--help" not in words:
                assert make_parser().parse_args(words).action


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_can_be_written_like_that(page: Path) -> None:
    stand_for = {"N": "1", "ROUND": "1", "PORT": "80"}
    for command in re.findall(r"`(fedhm [^`…]+)`", page.read_text()):
        words = [re.sub(r"\b(N|ROUND|PORT)$", lambda found: stand_for[found[1]], word) for word in shlex.split(command)]
        if len(words) > 2 and not words[-1].startswith("--") and words[1:] != ["flower", "up"]:
            assert make_parser().parse_args(words[1:]).action, command


def test_every_name_has_its_place_in_the_reference() -> None:
    named = re.findall(r"^::: (fedhm\S+)\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), flags=re.MULTILINE)
    own = [(module, name) for module, name in named if module != "fedhm.tracking"]
    for module, name in own:
        assert getattr(import_module(module), name) is getattr(fedhm, name)
    assert {name for _, name in own} == set(fedhm.__all__) - {"models", "tracking"}
    assert {name for pair in named if pair not in own for name in pair[1:]} == set(fedhm.tracking.__all__)


def test_every_page_is_in_the_sites_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = set(re.findall(r"([\w-]+\.md)$", menu, flags=re.MULTILINE))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "plan_ranks" in (tmp_path / "reference" / "index.html").read_text()
