"""The kinds of files that can be written: what each needs, how it is written, and how its own runtime reads it."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from torch import Tensor
from torch.export import ExportedProgram

from fedhm.errors import FedhmError

Outputs = Callable[[Tensor], Tensor]  # what a runtime gives for raw inputs


class Format(Protocol):
    SUFFIX: str  # of its files
    RUNTIME: str  # that reads them
    MODULES: tuple[str, ...]  # that have to be installed
    INSTALL: str  # how
    MOST: int | None  # samples at once; None: any number

    def write(self, program: ExportedProgram, path: Path, facts: Mapping[str, str]) -> None:
        """Write the program, with facts as the format's own metadata."""

    def load(self, path: Path, threads: int = 0) -> Outputs:
        """Read a file by the format's runtime; 0 threads: as many as the runtime likes."""


FORMATS = {"onnx": "onnx_format", "torch": "torch_format", "executorch": "executorch_format"}


def find_format(name: str) -> Format:
    """Return a format by its name, if what it needs is installed."""
    if name not in FORMATS:
        raise FedhmError(f"there is no format '{name}', known are {', '.join(FORMATS)}")
    found = cast(Format, import_module(f"fedhm.export.formats.{FORMATS[name]}"))
    if missing := [module for module in found.MODULES if find_spec(module) is None]:
        raise FedhmError(f"to export to {name}, {missing[0]} has to be installed: {found.INSTALL}")
    return found
