"""The progress of a run: a live bar in a terminal, a line for each round elsewhere."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from torch import nn

from fedhm.config.objective import Metric
from fedhm.machine.printable import accept_any_text
from fedhm.report.format import format_bytes, format_macs, format_parameters
from fedhm.server.callbacks import About
from fedhm.server.record import Record
from fedhm.work.work import work_of


def tier_lines(about: About) -> list[str]:
    """Return a line for each tier: its parameters, MACs and bytes, and their shares of the whole model's."""
    width = max(map(len, about.costs), default=0)
    lines: list[str] = []
    for tier, cost in about.costs.items():
        whole = about.full
        parameters, macs, size = format_parameters(cost.parameters), format_macs(cost.macs), format_bytes(cost.bytes)
        if whole is not None:
            parameters += _share(cost.parameters, whole.parameters)
            macs += _share(cost.macs, whole.macs)
            size += _share(cost.bytes, whole.bytes)
        lines.append(f"tier {tier:<{width}}  parameters {parameters}  MACs {macs}  bytes {size}")
    return lines


def _share(part: int, whole: int) -> str:
    return f" ({100 * part / whole:.0f} %)" if whole else ""


class _RunLines:
    """Prints a line for each tier at the start of a run."""

    console: Console

    def begun(self, about: About) -> None:
        for line in tier_lines(about):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def ended(self, networks: Mapping[str, nn.Module]) -> None:
        pass

    def close(self) -> None:
        pass


class LiveBar(_RunLines):
    """A bar of rounds, with the tasks of the current round and the headline metric of the last evaluation."""

    def __init__(self, console: Console, headline: Metric) -> None:
        self.console, self._headline = console, headline
        self._progress = Progress(
            TextColumn("[bold]round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=14),
            TimeRemainingColumn(),
            TextColumn("left  {task.fields[doing]:<12}"),
            TextColumn("[green]{task.fields[metrics]}"),
            console=console,
        )
        self._bar = self._progress.add_task("", total=None, doing="", metrics="")

    def __enter__(self) -> "LiveBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.update(self._bar, doing="")
        self._progress.stop()

    def started(self, done: int, rounds: int) -> None:
        self._progress.start()  # not before: while texts are read, another bar is shown
        self._progress.update(self._bar, completed=done, total=rounds)

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None:
        self._progress.update(self._bar, completed=round_number - 1, doing=f"{work_of(what).short} {done}/{of}")

    def round_done(self, record: Record) -> None:
        self._progress.update(self._bar, completed=record.round)
        if record.metrics:
            values = (metrics[self._headline.name] for metrics in record.metrics.values())
            self._progress.update(self._bar, metrics=self._headline.brief(*values) + _epsilon(record))
        if record.stopped:
            self._progress.console.print(f"stopped: {record.stopped}", markup=False, highlight=False)


class LogLines(_RunLines):
    """One line for each round, for logs."""

    def __init__(self, console: Console, headline: Metric) -> None:
        self.console, self._headline = console, headline
        self._rounds = 0

    def __enter__(self) -> "LogLines":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def started(self, done: int, rounds: int) -> None:
        self._rounds = rounds
        if done:
            self.console.print(f"{done} of {rounds} rounds are done", markup=False)

    def task_done(self, *_: object) -> None:
        return

    def round_done(self, record: Record) -> None:
        headline = self._headline
        evaluated = (f"{tier} {headline.brief(metrics[headline.name])}" for tier, metrics in record.metrics.items())
        losses = (f"{tier} {traffic.loss:.3f}" for tier, traffic in sorted(record.traffic.items()))
        trained = f"training loss {'  '.join(losses)}" if record.traffic else "nobody trained"
        what = "  ".join(evaluated) if record.metrics else trained
        took = f"{sum(record.seconds.values()):.1f} s"
        line = f"round {record.round}/{self._rounds}  {what}{_epsilon(record)}  {took}"
        self.console.print(line, markup=False)
        if record.stopped:
            self.console.print(f"stopped: {record.stopped}", markup=False)


def _epsilon(record: Record) -> str:
    return "" if record.epsilon is None else f"  ε {record.epsilon:.3g}"


@contextmanager
def show_rounds(shown: bool, headline: Metric) -> Iterator[list[LiveBar | LogLines]]:
    """Yield the watchers that show rounds, on stderr so that stdout belongs to the program; none if not `shown`."""
    if not shown:
        yield []
        return
    with progress(Console(stderr=True), headline) as bar:
        yield [bar]


def progress(console: Console, headline: Metric) -> LiveBar | LogLines:
    """Return a watcher for the console that shows the metric `headline`."""
    accept_any_text(console.file)  # of a ServerApp, in a process of Flower's, no other code does it
    return LiveBar(console, headline) if console.is_terminal else LogLines(console, headline)
