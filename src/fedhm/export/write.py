"""Writing an exported file: it is written in a temporary folder, checked with its runtime, then moved into place."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from fedhm.errors import FedhmError
from fedhm.export.formats import Format, Outputs, find_format, quantize_onnx
from fedhm.export.program import as_program
from fedhm.export.source import ExportSource
from fedhm.machine.files import file_name, make_folder
from fedhm.machine.printable import printable
from fedhm.networks.inputs import require_tensor

TOLERANCE = 1e-4  # of the largest output: sums in another order differ by less, errors by more
BATCH = 128
UNFINISHED = f".writing-{os.getpid()}-"  # begins the names of this process's temporary folders


@dataclass(frozen=True)
class Exported:
    """A file that has been written, and the results of checking it with its runtime."""

    path: Path
    format: str
    int8: bool
    difference: float  # from the network's outputs, relative to the largest of them
    random: bool  # it was compared on random inputs, because there were no samples
    metrics: dict[str, float]  # on the test samples, with the runtime; empty if there are none
    manifest: Path | None = None  # of a training graph, whose `difference` is that of the gradients


def write(source: ExportSource, to: str, folder: Path, *, int8: bool = False) -> Exported:
    """Write a network in a format into a folder. A file that its runtime reads differently is refused."""
    target = find_format(to)
    if int8 and to != "onnx":
        raise FedhmError(f"--int8 is for onnx: quantize {to} files with their own tools")
    if int8 and source.calibration is None:
        raise FedhmError("8 bits need samples for the ranges of the activations: pass some with samples=")
    program = as_program(source, target.max_batch)
    name = f"{file_name(source.name)}{'.int8' if int8 else ''}{target.suffix}"
    with temporary_folder(folder) as beside:
        written = beside / name
        try:
            target.write(program, written, _facts(source, int8))
        except (
            RuntimeError,
            ValueError,
            TypeError,
            NotImplementedError,
        ) as error:  # an operation that the format lacks
            reason = str(error).strip().partition("\n")[0]
            raise FedhmError(f"the model of {source.name} cannot be written as {to}: {reason}") from error
        try:
            difference = _difference(source, target, written)
        except Exception as error:  # whatever a runtime raises
            reason = printable(str(error)) or type(error).__name__
            raise FedhmError(
                f"{target.runtime} cannot run the model of {source.name}: {reason}; nothing was written"
            ) from error
        if not difference <= TOLERANCE:
            raise FedhmError(
                f"{target.runtime} gives other outputs than the network of {source.name}, by {difference:.2g} of the "
                "largest: nothing was written"
            )
        if int8:
            assert source.calibration is not None
            plain = written.rename(written.with_suffix(".plain"))
            quantize_onnx(plain, written, source.calibration)
            plain.unlink()
            difference = _difference(source, target, written)
        metrics = _measure(source, target.load(written), target.max_batch)
    return Exported(folder / name, to, int8, difference, source.random, metrics)


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, whose files are moved into `folder` if nothing was raised."""
    make_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=UNFINISHED) as name:
        beside = Path(name)
        yield beside
        for file in beside.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
            file.replace(folder / file.name)


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary folders of this process, which is about to end."""
    for path in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def _facts(source: ExportSource, int8: bool) -> dict[str, str]:
    raw = "uint8 images (N, C, H, W)" if source.preprocessing is not None else f"{source.inputs.dtype}"
    facts = {"fedhm": version("fedhm"), "tier": source.name, "inputs": raw, "precision": "int8" if int8 else "fp32"}
    if source.classes:
        facts["classes"] = json.dumps(source.classes, ensure_ascii=False)
    return facts | dict(source.origin)


def _difference(source: ExportSource, target: Format, path: Path) -> float:
    outputs = target.load(path)
    largest = apart = 0.0
    for part in (source.inputs[:1], *source.inputs.split(target.max_batch or BATCH)):  # one, and many at once
        expected = source.outputs(part)
        found = outputs(part)
        if found.shape != expected.shape or not torch.isfinite(found).all():
            return float("inf")
        largest = max(largest, float(expected.abs().max()))
        apart = max(apart, float((found - expected).abs().max()))
    return apart / (largest or 1.0)


def _measure(source: ExportSource, outputs: Outputs, max_batch: int | None) -> dict[str, float]:
    """Return the metrics on the test samples, from the outputs of a runtime."""
    if source.test is None or source.objective is None or not source.objective.measurable:
        return {}
    sums: dict[str, torch.Tensor] = {}
    for indices in torch.arange(len(source.test)).split(max_batch or BATCH):
        found = outputs(require_tensor(source.test.inputs, "export")[indices])
        for name, value in source.objective.sums(found, source.test.labels[indices]).items():
            sums[name] = sums.get(name, torch.zeros(())) + value.double()
    return dict(source.objective.results(sums, len(source.test)))
