"""How fast exported files are, and how much memory they take, measured here with their runtimes."""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from fedhm.config.objective import Metric
from fedhm.errors import FedhmError
from fedhm.export.formats import find_format
from fedhm.export.subject import Subject
from fedhm.export.write import Exported
from fedhm.machine.files import file_name, write_atomically
from fedhm.measure.cost import Cost, measure
from fedhm.report.format import format_bytes, format_macs
from fedhm.report.plot import COLOURS, Line, Plot, Symbol, save_png
from fedhm.report.sheets import Sheet, markdown_table

SYMBOLS: tuple[Symbol, ...] = ("circle", "square", "diamond", "x", "circle-open")
SECONDS = 1.0  # for each file
FEWEST, MOST = 15, 200  # times that each is run
WARM = 3


@dataclass(frozen=True)
class Timed:
    seconds: float  # the median, of one sample on one thread
    memory: int | None  # the most bytes that loading and running it adds to the runtime's own; None: unknown here


def timed(files: Sequence[Exported], sample: Tensor) -> list[Timed]:
    """Measure files in turn, so that whatever else the machine does hits all of them alike.

    Time is the processor's: on one thread that is what a call takes where nobody else wants the processor.
    """
    loaded = [find_format(file.format).load(file.path, threads=1) for file in files]
    spent: list[list[float]] = [[] for _ in files]
    began = time.perf_counter()
    while len(spent[0]) < FEWEST + WARM or (
        time.perf_counter() - began < SECONDS * len(files) and len(spent[0]) < MOST
    ):
        for outputs, seconds in zip(loaded, spent, strict=True):
            start = time.process_time()
            outputs(sample)
            seconds.append(time.process_time() - start)
    medians = [statistics.median(seconds[WARM:]) for seconds in spent]
    return [Timed(median, peak_memory(file, sample)) for median, file in zip(medians, files, strict=True)]


def peak_memory(file: Exported, sample: Tensor) -> int | None:
    """Return what a process of its own needs more, at most, when it loads and runs the file."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "sample.safetensors"
        save_file({"sample": sample.contiguous()}, inputs)
        command = [sys.executable, "-m", "fedhm.export.peak", file.format, str(file.path.absolute()), str(inputs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise FedhmError(f"a process that was to run {file.path} failed: {' '.join(said)}")
    peak: int | None = json.loads(done.stdout.splitlines()[-1])
    return peak


# A card for each tier: what its files weigh, how good and how fast they are, and where they come from.

HEADINGS = ("tier", "file", "size", "parameters", "MACs/sample")
MEASURED = ("latency", "memory")


@dataclass(frozen=True)
class Row:
    subject: Subject
    file: Exported
    cost: Cost
    found: Timed

    @property
    def size(self) -> int:
        return self.file.path.stat().st_size

    @property
    def kind(self) -> str:
        return f"{self.file.format} {'int8' if self.file.int8 else 'fp32'}"

    def cells(self, metric: Metric) -> list[str]:
        value = self.file.metrics.get(metric.name)
        return [
            self.subject.name,
            self.kind,
            format_bytes(self.size),
            f"{self.cost.parameters:,}",
            format_macs(self.cost.macs),
            "–" if value is None else metric.shown(value),
            f"{1e3 * self.found.seconds:.3f} ms",
            format_bytes(self.found.memory),
        ]


def write_cards(
    subjects: Sequence[Subject], exported: Mapping[str, Sequence[Exported]], out: Path
) -> tuple[Sheet, list[Path]]:
    """Measure all files, in turn; write a card for each tier, and the table and one plot for all of them."""
    objective = subjects[0].objective
    if objective is None:
        raise FedhmError("a card is for the tiers of a run")
    pairs = [(subject, file) for subject in subjects for file in exported[subject.name]]
    found = timed([file for _, file in pairs], subjects[0].inputs[:1])
    costs = {subject.name: _cost(subject) for subject in subjects}
    rows = [Row(subject, file, costs[subject.name], each) for (subject, file), each in zip(pairs, found, strict=True)]
    written: list[Path] = []
    for subject in subjects:
        own = [row for row in rows if row.subject is subject]
        path = out / f"card-{file_name(subject.name)}.md"
        write_atomically(path, _card(subject, own, objective.headline))
        written.append(path)
    table, of_all = out / "cards.md", sheet(rows, objective.headline)
    write_atomically(table, markdown_table(of_all))
    plots = card_plots(rows, objective.headline)
    return of_all, [*written, table, save_png(plots, out / "cards.png", side_by_side=True)]


def card_plots(rows: Sequence[Row], metric: Metric) -> list[Plot]:
    """Return the metric by latency and by size on disk: a symbol for each kind of file, with the tier beside it."""
    axes: dict[str, tuple[str, Callable[[Row], float]]] = {
        "latency": ("latency of one sample, one thread (ms)", lambda row: 1e3 * row.found.seconds),
        "size": ("size on disk (kB)", lambda row: row.size / 1e3),
    }
    kinds = list(dict.fromkeys(row.kind for row in rows))
    plots: list[Plot] = []
    for by, (x_label, position) in axes.items():
        lines: list[Line] = []
        for kind, colour, symbol in zip(kinds, COLOURS, cycle(SYMBOLS), strict=False):
            own = [row for row in rows if row.kind == kind and metric.name in row.file.metrics]
            values = [metric.scaled(row.file.metrics[metric.name]) for row in own]
            tiers = [row.subject.name for row in own]
            x = [position(row) for row in own]
            lines.append(Line(kind, x, values, colour, kind="points", texts=tiers, symbol=symbol))
        summary = f"{metric.axis('test')} of each exported file by its {by}."
        plots.append(Plot(f"{metric.name} by {by}", x_label, metric.axis("test"), lines, summary, log_x=True))
    return plots


def sheet(rows: Sequence[Row], metric: Metric) -> Sheet:
    """Return a table with a row for each file."""
    by_tier = {row.subject.name: [r.cells(metric) for r in rows if r.subject is row.subject] for row in rows}
    note = (
        "Latency is the median of one sample on one thread, in processor time, files in turn; memory the most that "
        f"loading and running a file adds to its runtime; both on {_machine()}."
    )
    return Sheet([*HEADINGS, metric.name, *MEASURED], list(by_tier.values()), left=2, note=note)


def _card(subject: Subject, rows: Sequence[Row], metric: Metric) -> str:
    shape = "×".join(str(size) for size in subject.inputs.shape[1:])
    takes = f"raw images, uint8 (N, C, H, W) of {shape}" if subject.preprocessing else f"(N, {shape}) numbers"
    lines = [f"# Tier {subject.name}", "", f"- takes: {takes}"]
    if subject.classes:
        lines.append(f"- gives: a score for each of {len(subject.classes)} classes: {', '.join(subject.classes)}")
    lines += [f"- {name}: {value}" for name, value in subject.origin.items()]
    for row in rows:
        samples = "random inputs" if row.file.random else f"{len(subject.inputs)} samples"
        lines.append(f"- {row.file.path.name}: within {row.file.difference:.1e} of the network's outputs on {samples}")
    return "\n".join([*lines, "", markdown_table(sheet(rows, metric))])


def _cost(subject: Subject) -> Cost:
    dtype = None if subject.preprocessing is not None else subject.inputs.dtype
    return measure(subject.network, tuple(subject.inputs.shape[1:]), dtype)


def _machine() -> str:
    names = Path("/proc/cpuinfo")
    lines = names.read_text().splitlines() if names.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
