"""The file formats of exported models: ONNX, torch.export and ExecuTorch.

Each format writes a program and reads it back with the runtime that a device would use.
"""

import json
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram

from fedhm.errors import FedhmError
from fedhm.machine.device import threads as torch_threads
from fedhm.machine.extras import how_to_install

Outputs = Callable[[Tensor], Tensor]  # a runtime: raw inputs → outputs of the network
INPUT, OUTPUT = "inputs", "outputs"  # their names in ONNX files
FACTS_FILE = "fedhm.json"  # the extra file with the metadata in a .pt2 archive
CALIBRATION_BATCH = 32


class Format(ABC):
    suffix: ClassVar[str]
    runtime: ClassVar[str]  # its name in sentences
    modules: ClassVar[tuple[str, ...]]  # that have to be installed; the last one is the runtime
    install: ClassVar[str]  # the command that installs them
    max_batch: ClassVar[int | None] = None  # samples at once; None: any number

    @abstractmethod
    def write(self, program: ExportedProgram, path: Path, facts: Mapping[str, str]) -> None:
        """Write the program, with facts as the format's own metadata."""

    @abstractmethod
    def load(self, path: Path, threads: int = 0) -> Outputs:
        """Read a file with the format's runtime. With 0 threads, the runtime chooses their number."""


class OnnxFormat(Format):
    """ONNX files, written by torch's exporter and read by ONNX Runtime."""

    suffix: ClassVar = ".onnx"
    runtime: ClassVar = "ONNX Runtime"
    modules: ClassVar = ("onnx", "onnxscript", "onnxruntime")
    install: ClassVar = how_to_install("export")

    def write(self, program: ExportedProgram, path: Path, facts: Mapping[str, str]) -> None:
        with _quiet("torch.onnx"):  # the exporter mentions, for instance, that torchvision is not installed
            written = torch.onnx.export(program, dynamo=True, input_names=[INPUT], output_names=[OUTPUT], verbose=False)
        assert written is not None
        for node in written.model.graph.all_nodes():
            node.metadata_props.clear()  # the Python lines that it comes from, which weigh more than a small network
        written.model.metadata_props.update(facts)
        written.model.producer_name = "fedhm"
        written.save(path, external_data=False)

    def load(self, path: Path, threads: int = 0) -> Outputs:
        session = open_session(path, threads)

        def outputs(inputs: Tensor) -> Tensor:
            (found,) = session.run([OUTPUT], {INPUT: inputs.contiguous().numpy()})
            return torch.from_numpy(found)

        return outputs


def open_session(path: Path, threads: int = 0) -> Any:
    """Return ONNX Runtime's session for a file, on the processor."""
    import onnxruntime  # an extra

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def quantize_onnx(source: Path, target: Path, samples: Tensor) -> None:
    """Write `source` with 8-bit convolutions and matrix products, and a scale for each channel of a weight.

    Quantization is static: training samples give the ranges of the activations. Weights use 7 of the 8 bits, because
    x86 processors without VNNI add pairs of products in 16 bits, which 8 bits would overflow.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Samples(CalibrationDataReader):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            self.batches: Iterator[Tensor] = iter(samples.split(CALIBRATION_BATCH))

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            return None if batch is None else {INPUT: batch.contiguous().numpy()}

    with _quiet():  # it recommends another tool of its own
        quantize_static(
            source, target, Samples(), quant_format=QuantFormat.QDQ, per_channel=True, reduce_range=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip


class TorchFormat(Format):
    """`.pt2` files of torch.export. torch reads them, and its compilers for devices start from them."""

    suffix: ClassVar = ".pt2"
    runtime: ClassVar = "torch"
    modules: ClassVar = ("torch",)
    install: ClassVar = "pip install torch"

    def write(self, program: ExportedProgram, path: Path, facts: Mapping[str, str]) -> None:
        torch.export.save(program, path, extra_files={FACTS_FILE: json.dumps(dict(facts))})

    def load(self, path: Path, threads: int = 0) -> Outputs:
        network = torch.export.load(path).module(check_guards=False)

        @torch.no_grad()
        def outputs(inputs: Tensor) -> Tensor:
            with torch_threads(threads or torch.get_num_threads()):
                found: Tensor = network(inputs)
            return found

        return outputs


class ExecutorchFormat(Format):
    """`.pte` files of ExecuTorch with the kernels of XNNPACK, for phones and smaller devices."""

    suffix: ClassVar = ".pte"
    runtime: ClassVar = "ExecuTorch"
    modules: ClassVar = ("executorch",)
    install: ClassVar = how_to_install("executorch")
    # The memory for a batch is planned in advance. From 16 samples on, torch chooses other kernels for convolutions,
    # and the graph that ExecuTorch makes is then for fewer than 16, whatever was asked for.
    max_batch: ClassVar = 8

    def write(self, program: ExportedProgram, path: Path, facts: Mapping[str, str]) -> None:
        """Write the program. The format has no metadata, so facts go into a file beside it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its imports warn
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower

            lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
        path.write_bytes(lowered.buffer)
        path.with_name(path.name + ".json").write_text(json.dumps(dict(facts), indent=2) + "\n", encoding="utf-8")

    def load(self, path: Path, threads: int = 0) -> Outputs:  # noqa: ARG002
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


FORMATS: dict[str, Format] = {"onnx": OnnxFormat(), "torch": TorchFormat(), "executorch": ExecutorchFormat()}


def find_format(name: str) -> Format:
    """Return a format by its name, if the modules that it needs are installed."""
    if name not in FORMATS:
        raise FedhmError(f"there is no format '{name}', known are {', '.join(FORMATS)}")
    found = FORMATS[name]
    if missing := [module for module in found.modules if find_spec(module) is None]:
        raise FedhmError(f"to export to {name}, {missing[0]} has to be installed: {found.install}")
    return found


@contextmanager
def _quiet(logger_name: str | None = None) -> Iterator[None]:
    """Silence a tool's warnings and log messages below errors."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
