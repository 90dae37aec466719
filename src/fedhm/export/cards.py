"""Cards of exported files: size, accuracy, latency and memory, measured here with the runtimes of the files."""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fedhm.config.objective import Metric
from fedhm.errors import FedhmError
from fedhm.export.formats import find_format
from fedhm.export.source import ExportSource
from fedhm.export.training import TrainingSource
from fedhm.export.write import Exported
from fedhm.machine.files import file_name, write_atomically
from fedhm.machine.process import utf8_output
from fedhm.measure.cost import Cost, measure
from fedhm.ondevice.graph import TrainingStep, rows_for
from fedhm.report.format import format_bytes, format_macs
from fedhm.report.palette import tier_palette
from fedhm.report.plot import SYMBOLS, Line, Plot, save_png
from fedhm.report.sheets import Sheet, markdown_table, markdown_text

SECONDS = 1.0  # of measuring for each file
MIN_CALLS, MAX_CALLS = 15, 200  # of each file
WARM_UP = 3  # calls that do not count


@dataclass(frozen=True)
class Speed:
    seconds: float  # median for one sample on one thread
    memory: int | None  # peak bytes that loading and running add to the runtime's own; None: unknown on this system


def measure_speed(files: Sequence[Exported], sample: Tensor) -> list[Speed]:
    """Measure the files in turn, so that other load on the machine affects all of them alike.

    Time is processor time. On one thread, a call takes as long if nothing else wants the processor.
    """
    loaded = [find_format(file.format).load(file.path, threads=1) for file in files]
    spent: list[list[float]] = [[] for _ in files]
    began = time.perf_counter()
    while len(spent[0]) < MIN_CALLS + WARM_UP or (
        time.perf_counter() - began < SECONDS * len(files) and len(spent[0]) < MAX_CALLS
    ):
        for outputs, seconds in zip(loaded, spent, strict=True):
            start = time.process_time()
            outputs(sample)
            seconds.append(time.process_time() - start)
    medians = [statistics.median(seconds[WARM_UP:]) for seconds in spent]
    return [Speed(median, peak_memory(file, sample)) for median, file in zip(medians, files, strict=True)]


def peak_memory(file: Exported, sample: Tensor) -> int | None:
    """Return the peak of the memory that loading and running the file adds, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "sample.safetensors"
        save_file({"sample": sample.contiguous()}, inputs)
        command = [sys.executable, "-m", "fedhm.export.peak", file.format, str(file.path.absolute()), str(inputs)]
        done = subprocess.run(
            command, capture_output=True, env=utf8_output(), encoding="utf-8", errors="replace", check=False
        )
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise FedhmError(f"the process that measures {file.path} failed: {' '.join(said)}")
    peak: int | None = json.loads(done.stdout.splitlines()[-1])
    return peak


FIRST_COLUMNS = ("tier", "file", "size", "parameters", "MACs/sample")
LAST_COLUMNS = ("latency", "memory")


@dataclass(frozen=True)
class Row:
    source: ExportSource
    file: Exported
    cost: Cost
    speed: Speed

    @property
    def size(self) -> int:
        return self.file.path.stat().st_size

    @property
    def kind(self) -> str:
        return f"{self.file.format} {'int8' if self.file.int8 else 'fp32'}"

    def cells(self, metric: Metric) -> list[str]:
        value = self.file.metrics.get(metric.name)
        return [
            self.source.name,
            self.kind,
            format_bytes(self.size),
            f"{self.cost.parameters:,}",
            format_macs(self.cost.macs),
            "–" if value is None else metric.shown(value),
            f"{1e3 * self.speed.seconds:.3f} ms",
            format_bytes(self.speed.memory),
        ]


def write_cards(
    sources: Sequence[ExportSource], exported: Mapping[str, Sequence[Exported]], out: Path
) -> tuple[Sheet, list[Path]]:
    """Measure all files in turn. Write a card for each tier, and a table and a plot of all files."""
    objective = sources[0].objective
    if objective is None:
        raise FedhmError("a card is for the tiers of a run")
    pairs = [(source, file) for source in sources for file in exported[source.name]]
    speeds = measure_speed([file for _, file in pairs], sources[0].inputs[:1])
    costs = {source.name: _cost(source) for source in sources}
    rows = [Row(source, file, costs[source.name], each) for (source, file), each in zip(pairs, speeds, strict=True)]
    written: list[Path] = []
    for source in sources:
        own = [row for row in rows if row.source is source]
        path = out / f"card-{file_name(source.name)}.md"
        write_atomically(path, _card(source, own, objective.headline))
        written.append(path)
    table, all_files = out / "cards.md", card_sheet(rows, objective.headline)
    write_atomically(table, markdown_table(all_files))
    plots = card_plots(rows, objective.headline)
    return all_files, [*written, table, save_png(plots, out / "cards.png", side_by_side=True)]


def card_plots(rows: Sequence[Row], metric: Metric) -> list[Plot]:
    """Return the metric by latency and by size on disk: a colour for each tier, a symbol for each kind of file."""
    axes: dict[str, tuple[str, str | None, Callable[[Row], float]]] = {
        "latency": ("latency of one sample, one thread (ms)", None, lambda row: 1e3 * row.speed.seconds),
        "size": ("size on disk", "B", lambda row: row.size),
    }
    kinds = list(dict.fromkeys(row.kind for row in rows))
    largest_first = sorted({row.source.name: row.cost.parameters for row in rows}.items(), key=lambda tier: -tier[1])
    colours = dict(zip((name for name, _ in largest_first), tier_palette(len(largest_first)), strict=True))
    plots: list[Plot] = []
    for by, (x_label, unit, position) in axes.items():
        lines = [
            Line(
                f"{row.source.name}, {row.kind}",
                [position(row)],
                [metric.scaled(row.file.metrics[metric.name])],
                colours[row.source.name],
                kind="points",
                run=row.kind,
                tier=row.source.name,
                symbol=SYMBOLS[kinds.index(row.kind) % len(SYMBOLS)],
            )
            for row in rows
            if metric.name in row.file.metrics
        ]
        plots.append(
            Plot(
                title=f"{metric.name} by {by}",
                x_label=x_label,
                y_label=metric.axis("test"),
                lines=lines,
                summary=f"{metric.axis('test')} of each exported file by its {by}.",
                log_x=True,
                x_unit=unit,
                legend_title="file",
                run_labels={kind: kind for kind in kinds},
            )
        )
    return plots


def card_sheet(rows: Sequence[Row], metric: Metric) -> Sheet:
    """Return a table with a row for each file."""
    by_tier = {row.source.name: [r.cells(metric) for r in rows if r.source is row.source] for row in rows}
    note = (
        "Latency is the median of one sample on one thread, in processor time, files in turn; memory the most that "
        f"loading and running a file adds to its runtime; both on {_machine()}."
    )
    return Sheet([*FIRST_COLUMNS, metric.name, *LAST_COLUMNS], list(by_tier.values()), left=2, note=note)


def _card(source: ExportSource, rows: Sequence[Row], metric: Metric) -> str:
    shape = "×".join(str(size) for size in source.inputs.shape[1:])
    takes = f"raw images, uint8 (N, C, H, W) of {shape}" if source.preprocessing else f"(N, {shape}) numbers"
    facts = [f"takes: {takes}"]
    if source.classes:
        facts.append(f"gives: a score for each of {len(source.classes)} classes: {', '.join(source.classes)}")
    facts += [f"{name}: {value}" for name, value in source.origin.items()]
    for row in rows:
        samples = "random inputs" if row.file.random else f"{len(source.inputs)} samples"
        facts.append(f"{row.file.path.name}: within {row.file.difference:.1e} of the network's outputs on {samples}")
    lines = [f"# Tier {markdown_text(source.name)}", "", *(f"- {markdown_text(fact)}" for fact in facts)]
    return "\n".join([*lines, "", markdown_table(card_sheet(rows, metric))])


# ---- training ----

TRAINING_COLUMNS = ("tier", "file", "parameters", "rows", "step", "PyTorch's step", "memory", "PyTorch's memory")


def write_training_cards(
    sources: Sequence[TrainingSource], exported: Sequence[Exported], out: Path
) -> tuple[Sheet, Path]:
    """Measure a training step of each tier in the runtime and in PyTorch, each in a process of its own."""
    rows: list[list[list[str]]] = []
    for source, file in zip(sources, exported, strict=True):
        found = {runtime: _training_speed(source, file, runtime) for runtime in ("executorch", "torch")}
        parameters = sum(p.numel() for p in source.network.parameters())
        cells = [
            source.tier,
            format_bytes(file.path.stat().st_size),
            f"{parameters:,}",
            str(rows_for(source.train.batch)),
        ]
        cells += [f"{1e3 * each.seconds:.1f} ms" for each in found.values()]
        cells += [format_bytes(each.memory) for each in found.values()]
        rows.append([cells])
    note = (
        "A step is one batch forward and backward with its optimizer, the median on one thread in processor time; "
        f"memory the most that loading and training add to a process with the runtime loaded; both on {_machine()}."
    )
    sheet = Sheet(list(TRAINING_COLUMNS), rows, left=1, note=note)
    path = out / "training-cards.md"
    write_atomically(path, markdown_table(sheet))
    return sheet, path


def _training_speed(source: TrainingSource, file: Exported, runtime: str) -> Speed:
    """Return the seconds of a step and its peak of memory, measured in a process of its own."""
    kind, nesting = source.example, source.nesting
    step = TrainingStep(
        source.network, source.objective, source.train.frobenius_decay, kind.preprocessing, nesting
    ).train()
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder) / "network.pt2"
        if runtime == "torch":
            rows = rows_for(source.train.batch)
            places = torch.arange(rows) % len(kind.targets)
            bases = [torch.zeros(shape) for shape in (nesting.bases.values() if nesting else ())]
            given = (kind.inputs[places], kind.targets[places], torch.ones(rows), torch.ones(kind.outputs), *bases)
            torch.export.save(torch.export.export(step, given), network)
        command = [sys.executable, "-m", "fedhm.export.training_peak", runtime, str(file.manifest), str(network)]
        done = subprocess.run(
            command, capture_output=True, env=utf8_output(), encoding="utf-8", errors="replace", check=False
        )
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise FedhmError(f"the process that measures {file.path} failed: {' '.join(said)}")
    seconds, memory = json.loads(done.stdout.splitlines()[-1])
    return Speed(seconds, memory)


def _cost(source: ExportSource) -> Cost:
    dtype = None if source.preprocessing is not None else source.inputs.dtype
    return measure(source.network, tuple(source.inputs.shape[1:]), dtype)


def _machine() -> str:
    names = Path("/proc/cpuinfo")
    lines = names.read_text(encoding="utf-8").splitlines() if names.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
