"""A card for each tier: what its files weigh, how good and how fast they are, and where they come from."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedhm.config.sections.objective import Metric
from fedhm.errors import FedhmError
from fedhm.export.cards.plot import draw
from fedhm.export.cards.timing import Timed, timed
from fedhm.export.subject import Subject
from fedhm.export.write import Exported
from fedhm.machine.files import write_atomically
from fedhm.machine.places import file_name
from fedhm.measure.cost import Cost, measure
from fedhm.report.sheets import Sheet, markdown_table, readable_bytes, readable_macs

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
            readable_bytes(self.size),
            f"{self.cost.parameters:,}",
            readable_macs(self.cost.macs),
            "–" if value is None else metric.shown(value),
            f"{1e3 * self.found.seconds:.3f} ms",
            readable_bytes(self.found.memory),
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
    points = [(row.subject.name, row.kind, row.found.seconds, row.size, row.file.metrics) for row in rows]
    return of_all, [*written, table, draw(points, objective.headline, out / "cards.png")]


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
