"""Weights and activations of 8 bits, for an ONNX file: static, with ranges that training samples have shown."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from fedhm.export.formats.onnx_format import INPUT

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
