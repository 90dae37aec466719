"""`.pt2` files of torch.export, which torch itself reads, and its compilers for devices start from."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from fedhm.export.formats import Outputs

SUFFIX = ".pt2"
RUNTIME = "torch"
MODULES = ("torch",)
INSTALL = "pip install torch"
MOST: int | None = None
FACTS = "fedhm.json"  # the extra file in the archive that has the metadata


def write(program: ExportedProgram, path: Path, facts: Mapping[str, str]) -> None:
    torch.export.save(program, path, extra_files={FACTS: json.dumps(dict(facts))})


def load(path: Path, threads: int = 0) -> Outputs:
    network = torch.export.load(path).module(check_guards=False)

    @torch.no_grad()
    def outputs(inputs: Tensor) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        try:
            found: Tensor = network(inputs)
        finally:
            torch.set_num_threads(before)
        return found

    return outputs
