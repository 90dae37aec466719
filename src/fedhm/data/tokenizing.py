"""How far the tokenizing of texts is, in a terminal: a bar that goes when all of them are read."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class TokenizingBar:
    """Texts that are read so far, of all that a run has; on stderr, so that what a program prints is its own."""

    def __init__(self, total: int | None, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=14),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not shown,
        )
        self._bar = self._progress.add_task("tokenizing", total=total)

    def __enter__(self) -> "TokenizingBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def read(self, texts: int) -> None:
        self._progress.advance(self._bar, texts)
