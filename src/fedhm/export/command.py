"""`fedhm export`: the tiers of a finished run as files, and cards with their accuracy, speed and memory."""

import argparse

from rich.console import Console

from fedhm.config.objective import Metric
from fedhm.errors import FedhmError
from fedhm.export.formats import find_format
from fedhm.export.source import sources_from_run
from fedhm.export.write import Exported, write
from fedhm.machine.files import check_folder
from fedhm.report.format import format_bytes
from fedhm.report.sheets import rich_table


def export(options: argparse.Namespace, console: Console) -> None:
    wanted = [(to, False) for to in dict.fromkeys(options.to)]
    for to, _ in wanted:
        find_format(to)  # before anything is read
    if options.int8:
        if "onnx" not in options.to:
            raise FedhmError("--int8 writes ONNX files: it goes with --to onnx")
        wanted.append(("onnx", True))
    out = options.out or options.folder / "export"
    if options.out:
        check_folder(out)
    exported: dict[str, list[Exported]] = {}
    sources = sources_from_run(options.folder, list(dict.fromkeys(options.tiers)), options.classes)
    for source in sources:
        for to, int8 in wanted:
            done = write(source, to, out, int8=int8)
            exported.setdefault(source.name, []).append(done)
            assert source.objective is not None
            console.print(sentence(done, source.objective.headline), highlight=False, markup=False, soft_wrap=True)
    if options.card:
        from fedhm.export.cards import write_cards

        table, written = write_cards(sources, exported, out)
        for part in table.split(console.width):
            console.print(rich_table(part))
        console.print(table.note, highlight=False, markup=False)
        for path in written:
            console.print(str(path), highlight=False, markup=False, soft_wrap=True)


def sentence(done: Exported, metric: Metric) -> str:
    """Return the line that is printed for a file."""
    size = format_bytes(done.path.stat().st_size)
    known = f", {metric.name} {metric.shown(done.metrics[metric.name])}" if metric.name in done.metrics else ""
    on = "random inputs" if done.random else "the run's samples"
    apart = f"outputs within {done.difference:.1e} of the network's on {on}"
    return f"{done.path}: {size}{known}, {apart}"
