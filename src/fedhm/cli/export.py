"""`fedhm export` writes the models of a finished run as files for devices."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedhm.cli.options import Verbs, add_changes, add_model, one_of, own_model, terminal
from fedhm.errors import FedhmError
from fedhm.machine.files import check_folder

if TYPE_CHECKING:
    from fedhm.config.objective import Metric
    from fedhm.export.write import Exported

DESCRIPTION = """\
Writes the models of a finished run's tiers as files that devices run: ONNX, torch.export's .pt2 or ExecuTorch's .pte.
They take raw images, and each is read again by its own runtime and compared with the network before it counts."""


def add_export(verbs: Verbs) -> None:
    parser = verbs.add_parser("export", help="models as files for devices", description=DESCRIPTION)
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="of a finished run; with --train also a preset or a config file"
    )
    parser.add_argument(
        "--tier", dest="tiers", nargs="+", default=[], metavar="TIER", help="such as 1/8 (default: all of the run)"
    )
    parser.add_argument(
        "--to",
        nargs="+",
        type=one_of("--to", "onnx", "torch", "executorch"),
        default=["onnx"],
        metavar="onnx|torch|executorch",
        help="one format or several (default: onnx)",
    )
    parser.add_argument("--int8", action="store_true", help="8-bit ONNX files, too, and their accuracy")
    parser.add_argument(
        "--card", action="store_true", help="measure latency and memory here: a card for each tier, and a plot"
    )
    parser.add_argument(
        "--train", action="store_true", help="files that train on a device, in place of files that predict"
    )
    add_changes(parser)
    add_model(parser)
    parser.add_argument("--classes", nargs="+", default=[], metavar="NAME", help="names of the classes, in order")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to (default: export in the run's folder)")
    parser.set_defaults(action=export, imports="fedhm.export.write")


def export(options: argparse.Namespace) -> None:
    """Write the models of a finished run; Ctrl-C removes a file that is not finished."""
    from fedhm.cli import exit_on_interrupt
    from fedhm.export.write import remove_unfinished

    out = options.out or (options.folder if options.folder.is_dir() else Path()) / "export"
    with exit_on_interrupt(lambda: remove_unfinished(out)):
        (_export_training if options.train else _export)(options, out)


def _export_training(options: argparse.Namespace, out: Path) -> None:
    from fedhm.config.loading import load_config
    from fedhm.export.cards import write_training_cards
    from fedhm.export.formats import find_format
    from fedhm.export.training import training_sources, write_training
    from fedhm.report.format import format_bytes
    from fedhm.report.sheets import rich_table

    if options.to != ["executorch"] or options.int8:
        raise FedhmError("--train writes ExecuTorch files in 32 bits: it goes with --to executorch")
    if options.classes:
        raise FedhmError("--classes names the outputs of files that predict: it does not go with --train")
    find_format("executorch")
    if options.out:
        check_folder(out)
    is_run = options.folder.is_dir()
    if is_run and options.changes:
        raise FedhmError("a finished run has its settings: --set is for a preset or a config file")
    origin = options.folder if is_run else load_config(str(options.folder), options.changes)
    console = terminal()
    sources = training_sources(origin, list(dict.fromkeys(options.tiers)), own_model(options))
    exported = []
    for source in sources:
        done = write_training(source, out)
        exported.append(done)
        size = format_bytes(done.path.stat().st_size)
        line = f"{done.path}: {size}, gradients within {done.difference:.1e} of PyTorch's on the clients' samples"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if options.card:
        table, written = write_training_cards(sources, exported, out)
        for part in table.split(console.width):
            console.print(rich_table(part))
        console.print(table.note, highlight=False, markup=False)
        console.print(str(written), highlight=False, markup=False, soft_wrap=True)


def _export(options: argparse.Namespace, out: Path) -> None:
    from fedhm.export.formats import find_format
    from fedhm.export.source import sources_from_run
    from fedhm.export.write import write
    from fedhm.report.sheets import rich_table

    if options.changes:
        raise FedhmError("--set is for --train with a preset or a config file")
    formats = [(to, False) for to in dict.fromkeys(options.to)]
    for to, _ in formats:
        find_format(to)  # refuses a missing package before anything is read
    if options.int8:
        if "onnx" not in options.to:
            raise FedhmError("--int8 writes ONNX files: it goes with --to onnx")
        formats.append(("onnx", True))
    if options.out:
        check_folder(out)
    console = terminal()
    exported: dict[str, list[Exported]] = {}
    sources = sources_from_run(options.folder, list(dict.fromkeys(options.tiers)), options.classes, own_model(options))
    for source in sources:
        for to, int8 in formats:
            done = write(source, to, out, int8=int8)
            exported.setdefault(source.name, []).append(done)
            assert source.objective is not None
            console.print(_line(done, source.objective.headline), highlight=False, markup=False, soft_wrap=True)
    if options.card:
        from fedhm.export.cards import write_cards

        table, written = write_cards(sources, exported, out)
        for part in table.split(console.width):
            console.print(rich_table(part))
        console.print(table.note, highlight=False, markup=False)
        for path in written:
            console.print(str(path), highlight=False, markup=False, soft_wrap=True)


def _line(done: "Exported", metric: "Metric") -> str:
    """Return the line that is printed for a file."""
    from fedhm.report.format import format_bytes

    size = format_bytes(done.path.stat().st_size)
    known = f", {metric.name} {metric.shown(done.metrics[metric.name])}" if metric.name in done.metrics else ""
    on = "random inputs" if done.random else "the run's samples"
    apart = f"outputs within {done.difference:.1e} of the network's on {on}"
    return f"{done.path}: {size}{known}, {apart}"
