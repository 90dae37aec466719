"""ONNX files, written by torch's exporter and read by ONNX Runtime."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from fedhm.export.formats import Outputs

SUFFIX = ".onnx"
RUNTIME = "ONNX Runtime"
MODULES = ("onnx", "onnxscript", "onnxruntime")
INSTALL = "pip install 'fedhm[export]'"
MOST: int | None = None
INPUT, OUTPUT = "inputs", "outputs"


def write(program: ExportedProgram, path: Path, facts: Mapping[str, str]) -> None:
    with _quiet():
        written = torch.onnx.export(program, dynamo=True, input_names=[INPUT], output_names=[OUTPUT], verbose=False)
    assert written is not None
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()  # the lines of Python that each comes from, which weigh more than a small network
    written.model.metadata_props.update(facts)
    written.model.producer_name = "fedhm"
    written.save(path, external_data=False)


def load(path: Path, threads: int = 0) -> Outputs:
    session = open_session(path, threads)

    def outputs(inputs: Tensor) -> Tensor:
        (found,) = session.run([OUTPUT], {INPUT: inputs.contiguous().numpy()})
        return torch.from_numpy(found)

    return outputs


def open_session(path: Path, threads: int = 0) -> Any:
    """Return the runtime's session for a file, on the processor."""
    import onnxruntime  # an extra

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what the exporter says of its own affairs, such as that torchvision is not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# Weights and activations of 8 bits, for an ONNX file: static, with ranges that training samples have shown.

BATCH = 32


def quantize(source: Path, target: Path, samples: Tensor) -> None:
    """Write `source` with 8-bit convolutions and products, each channel of a weight with a scale of its own.

    Weights have 7 of the 8 bits: x86 processors without VNNI add pairs of products in 16 bits, which 8 would overflow.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Samples(CalibrationDataReader):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            self.batches: Iterator[Tensor] = iter(samples.split(BATCH))

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            return None if batch is None else {INPUT: batch.contiguous().numpy()}

    logger = logging.getLogger()
    before = logger.level
    logger.setLevel(logging.ERROR)  # it recommends another tool of its own
    try:
        quantize_static(
            source, target, Samples(), quant_format=QuantFormat.QDQ, per_channel=True, reduce_range=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip
    finally:
        logger.setLevel(before)
