"""How a run goes, while it goes: a live bar in a terminal, a line per round elsewhere."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from fedhm.server.record import Record

SHORT = {"train": "train", "statistics": "BN", "distil": "distil"}  # the bar must fit 80 columns


class LiveBar:
    """Rounds as a bar, with the current round's tasks and the last accuracies beside it."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("[bold]round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=14),
            TimeRemainingColumn(),
            TextColumn("left  {task.fields[doing]:<12}"),
            TextColumn("[green]{task.fields[accuracy]}"),
            console=console,
        )
        self._bar = self._progress.add_task("", total=None, doing="", accuracy="")

    def __enter__(self) -> "LiveBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.update(self._bar, doing="")
        self._progress.stop()

    def started(self, done: int, rounds: int) -> None:
        self._progress.update(self._bar, completed=done, total=rounds)

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None:
        self._progress.update(self._bar, completed=round_number - 1, doing=f"{SHORT[what]} {done}/{of}")

    def round_done(self, record: Record) -> None:
        self._progress.update(self._bar, completed=record.round)
        if record.scores:
            accuracies = (f"{100 * score.accuracy:.1f}" for score in record.scores.values())
            self._progress.update(self._bar, accuracy="/".join(accuracies) + "%")


class Lines:
    """For logs: one line for each round."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rounds = 0

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def started(self, done: int, rounds: int) -> None:
        self._rounds = rounds
        if done:
            self._console.print(f"{done} of {rounds} rounds are done")

    def task_done(self, *_: object) -> None:
        return

    def round_done(self, record: Record) -> None:
        losses = "  ".join(f"{tier} {traffic.loss:.3f}" for tier, traffic in sorted(record.traffic.items()))
        what = _accuracies(record) if record.scores else f"training loss {losses}"
        self._console.print(f"round {record.round}/{self._rounds}  {what}  {sum(record.seconds.values()):.1f} s")


def progress(console: Console) -> LiveBar | Lines:
    return LiveBar(console) if console.is_terminal else Lines(console)


def _accuracies(record: Record) -> str:
    return "  ".join(f"{tier} {100 * score.accuracy:.1f}%" for tier, score in record.scores.items())
