"""Logs of a comparison say how long the runs that are left take."""

import io
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fedhm.compare import execute


@dataclass
class FakeCell:
    name: str
    rounds_done: int
    complete: bool = False

    @property
    def config(self) -> Any:
        return SimpleNamespace(train=SimpleNamespace(rounds=10))


def test_the_time_left_follows_from_the_rounds_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], io.StringIO()
    monkeypatch.setattr(execute.time, "monotonic", lambda: now[0])
    cells: list[Any] = [FakeCell("a", 0), FakeCell("b", 4), FakeCell("c", 10, complete=True)]
    with execute._progress(Console(file=said, width=200), cells) as lines:
        lines.update(cells[:2])
        now[0], cells[0].rounds_done, cells[0].complete = 100.0, 10, True
        lines.ended(cells[0], None)
        now[0], cells[1].rounds_done, cells[1].complete = 160.0, 10, True
        lines.ended(cells[1], None)
    assert said.getvalue().splitlines()[2:] == [
        "a done in 100 s, 2 of 3 runs, about 0:01:00 left",  # six rounds at ten seconds each
        "b done in 160 s, 3 of 3 runs",
    ]
