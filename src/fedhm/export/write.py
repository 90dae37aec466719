"""A file that counts once its own runtime gives what the network gives: written beside, checked, then renamed."""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from fedhm.errors import FedhmError
from fedhm.export.formats import Format, Outputs, find_format
from fedhm.export.formats.onnx_format import quantize
from fedhm.export.program import as_program
from fedhm.export.subject import Subject
from fedhm.machine.files import file_name, make_folder
from fedhm.machine.printable import printable
from fedhm.networks.inputs import require_tensor

TOLERANCE = 1e-4  # of the largest output: sums in another order differ by less, anything wrong by more
BATCH = 128
UNFINISHED = f".writing-{os.getpid()}-"  # how folders begin in which this process writes


@dataclass(frozen=True)
class Exported:
    """A file that has been written, and what was found when its runtime read it."""

    path: Path
    format: str
    int8: bool
    difference: float  # from the network's outputs, as a share of the largest of these
    random: bool  # it was compared on random inputs, for want of others
    metrics: dict[str, float]  # on the test samples, by the runtime; empty: there are none


def write(subject: Subject, to: str, folder: Path, *, int8: bool = False) -> Exported:
    """Write a subject in a format into a folder; what its runtime reads differently is not written."""
    made = find_format(to)
    if int8 and to != "onnx":
        raise FedhmError(f"--int8 is for onnx: {to} has tools of its own for that")
    if int8 and subject.calibration is None:
        raise FedhmError("8 bits need samples to find the ranges of the activations by: give some with samples=")
    program = as_program(subject, made.MOST)
    make_folder(folder)
    name = f"{file_name(subject.name)}{'.int8' if int8 else ''}{made.SUFFIX}"
    with tempfile.TemporaryDirectory(dir=folder, prefix=UNFINISHED) as beside:
        written = Path(beside) / name
        try:
            made.write(program, written, _facts(subject, int8))
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:  # an operation that it has not
            reason = str(error).strip().partition("\n")[0]
            raise FedhmError(f"the model of {subject.name} cannot be written as {to}: {reason}") from error
        try:
            difference = _difference(subject, made, written)
        except Exception as error:  # whatever a runtime raises
            reason = printable(str(error)) or type(error).__name__
            raise FedhmError(
                f"{made.RUNTIME} cannot run the model of {subject.name}: {reason}; nothing was written"
            ) from error
        if not difference <= TOLERANCE:
            raise FedhmError(
                f"{made.RUNTIME} gives other outputs than the network of {subject.name}, by {difference:.2g} of the "
                "largest: nothing was written"
            )
        if int8:
            assert subject.calibration is not None
            plain = written.rename(written.with_suffix(".plain"))
            quantize(plain, written, subject.calibration)
            plain.unlink()
            difference = _difference(subject, made, written)
        metrics = measured(subject, made.load(written), made.MOST)
        for file in Path(beside).iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
            file.replace(folder / file.name)
    return Exported(folder / name, to, int8, difference, subject.random, metrics)


def remove_unfinished(folder: Path) -> None:
    """Remove what this process was about to write, for one that is ended at once."""
    for path in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def _facts(subject: Subject, int8: bool) -> dict[str, str]:
    raw = "uint8 images (N, C, H, W)" if subject.preprocessing is not None else f"{subject.inputs.dtype}"
    facts = {"fedhm": version("fedhm"), "tier": subject.name, "inputs": raw, "precision": "int8" if int8 else "fp32"}
    if subject.classes:
        facts["classes"] = json.dumps(subject.classes, ensure_ascii=False)
    return facts | dict(subject.origin)


def _difference(subject: Subject, made: Format, path: Path) -> float:
    outputs = made.load(path)
    largest = apart = 0.0
    for part in (subject.inputs[:1], *subject.inputs.split(made.MOST or BATCH)):  # one, and many at once
        expected = subject.outputs(part)
        found = outputs(part)
        if found.shape != expected.shape or not torch.isfinite(found).all():
            return float("inf")
        largest = max(largest, float(expected.abs().max()))
        apart = max(apart, float((found - expected).abs().max()))
    return apart / (largest or 1.0)


def measured(subject: Subject, outputs: Outputs, most: int | None) -> dict[str, float]:
    """Return the metrics on the subject's test samples by what a runtime gives for them."""
    if subject.test is None or subject.objective is None:
        return {}
    sums: dict[str, torch.Tensor] = {}
    for indices in torch.arange(len(subject.test)).split(most or BATCH):
        found = outputs(require_tensor(subject.test.inputs, "export")[indices])
        for name, value in subject.objective.sums(found, subject.test.labels[indices]).items():
            sums[name] = sums.get(name, torch.zeros(())) + value.double()
    return dict(subject.objective.results(sums, len(subject.test)))
