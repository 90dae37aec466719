"""How a comparison goes, while it goes: one bar for the rounds of all its runs, or a line for each run."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedhm.compare.cells import Cell


class LiveBar:
    """Rounds of all runs, with what runs now beside it."""

    def __init__(self, console: Console, cells: Sequence[Cell]) -> None:
        self._console = console
        self._done = {cell.name: cell.rounds_done for cell in cells}
        self._progress = Progress(
            TextColumn("[bold]rounds"),
            MofNCompleteColumn(),
            BarColumn(bar_width=14),
            TimeRemainingColumn(),
            TextColumn("left  {task.fields[doing]}"),
            console=console,
            speed_estimate_period=600,  # a round may take minutes
        )
        total = sum(cell.config.train.rounds for cell in cells)
        self._bar = self._progress.add_task("", total=total, completed=sum(self._done.values()), doing="")

    def __enter__(self) -> "LiveBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.update(self._bar, doing="")
        self._progress.stop()

    def update(self, running: Sequence[Cell]) -> None:
        self._done |= {cell.name: cell.rounds_done for cell in running}
        doing = ", ".join(f"{cell.name} {self._done[cell.name]}" for cell in running)
        self._progress.update(self._bar, completed=sum(self._done.values()), doing=doing)

    def ended(self, cell: Cell, failure: str | None) -> None:
        self.update([cell])
        if failure:
            self._console.print(failure, style="red", highlight=False)


class Lines:
    """For logs: a line for each run that begins or ends."""

    def __init__(self, console: Console, cells: Sequence[Cell]) -> None:
        self._console, self._of = console, len(cells)
        self._done = sum(cell.complete for cell in cells)
        self._begun: dict[str, float] = {}

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def update(self, running: Sequence[Cell]) -> None:
        for cell in running:
            if cell.name not in self._begun:
                self._begun[cell.name] = time.monotonic()
                where = f" after round {cell.rounds_done}" if cell.rounds_done else ""
                self._say(f"{cell.name} runs{where}")

    def ended(self, cell: Cell, failure: str | None) -> None:
        self._done += failure is None
        seconds = time.monotonic() - self._begun[cell.name]
        self._say(failure or f"{cell.name} done in {seconds:.0f} s, {self._done} of {self._of} runs")

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def progress(console: Console, cells: Sequence[Cell]) -> LiveBar | Lines:
    return LiveBar(console, cells) if console.is_terminal else Lines(console, cells)
