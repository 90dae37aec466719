"""The docs are true: settings are all described, links lead somewhere, examples run."""

import re
from itertools import product
from pathlib import Path

import pytest
import torch

from fedhm.config.plugins import known
from fedhm.config.reading import _known_keys, presets

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
