"""`.pte` files of ExecuTorch, for phones and smaller devices, with its kernels of XNNPACK."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.export import ExportedProgram

from fedhm.export.formats import Outputs

SUFFIX = ".pte"
RUNTIME = "ExecuTorch"
MODULES = ("executorch",)
INSTALL = "pip install 'fedhm[executorch]'"
# the memory for so many samples is planned beforehand; of 16 or more, torch chooses other kernels for convolutions, and
# what ExecuTorch makes of the graph is then for fewer than 16, whatever was asked for
MOST: int | None = 8


def write(program: ExportedProgram, path: Path, facts: Mapping[str, str]) -> None:
    """Write the program; the format has no metadata, so facts go into a file beside it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    path.write_bytes(lowered.buffer)
    path.with_name(path.name + ".json").write_text(json.dumps(dict(facts), indent=2) + "\n")


def load(path: Path, threads: int = 0) -> Outputs:  # noqa: ARG001
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from executorch.runtime import Runtime

        program = Runtime.get().load_program(path)
        method = program.load_method("forward")

    def outputs(inputs: Tensor) -> Tensor:
        assert program is not None  # it has to live as long as its method
        found: Tensor = method.execute([inputs.contiguous()])[0]
        return found.clone()  # its memory is used again

    return outputs
