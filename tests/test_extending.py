"""Every block of docs/extending.md and docs/data.md runs, in the order of its page."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedhm.config import registry as plugins
from fedhm.data import sources as catalogue
from fedhm.lowrank import layers

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


@pytest.fixture
def tables() -> Iterator[None]:
    """The tables that the page adds to, which are as they were afterwards."""
    added_to: list[dict[Any, Any]] = [plugins._registered, catalogue.SOURCES, layers.LAYERS]
    before = [dict(table) for table in added_to]
    yield
    for table, old in zip(added_to, before, strict=True):
        table.clear()
        table.update(old)


@pytest.mark.usefixtures("tables")
def test_what_the_page_says_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 15
    namespace: dict[str, object] = {"__name__": "extending"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"block {number} of {PAGE.name}", "exec"), namespace)


def test_what_the_page_about_data_says_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.with_name("data.md")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    namespace: dict[str, object] = {"__name__": "data"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"block {number} of {page.name}", "exec"), namespace)
    assert "accuracy" in capsys.readouterr().out
