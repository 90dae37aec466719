"""Fashion-MNIST, and MNIST alike, from its four IDX files.

An IDX file is two zero bytes, a type code, the number of dimensions, each dimension as a big-endian
uint32, and then the values.
"""

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhm.data.samples import Samples, Source, channel_statistics
from fedhm.errors import FedhmError

CLASSES = 10
UNSIGNED_BYTE = 0x08
MOST = 1 << 28  # bytes of an unpacked file; the largest official one has a fifth of that
PARTS = ("train", "t10k")


def read_fashion_mnist(folder: Path) -> Source:
    """Read `train-` and `t10k-` `images-idx3-ubyte` and `labels-idx1-ubyte` from `folder`, plain or `.gz`."""
    train, test = (_read_part(folder, part) for part in PARTS)
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise FedhmError(f"{folder} holds training images of {_size(train)} but test images of {_size(test)} pixels")
    mean, std = channel_statistics(train.tensor)
    return Source(train, test, CLASSES, mean, std)


def holds_idx_files(folder: Path) -> bool:
    """Say whether any of the four files is there: if only some are, reading says which one is missing."""
    return any(_existing(folder / name) for part in PARTS for name in _names(part))


def _names(part: str) -> tuple[str, str]:
    return f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"


def _size(samples: Samples) -> str:
    return "×".join(str(side) for side in samples.inputs.shape[2:])


def _existing(path: Path) -> Path | None:
    zipped = path.with_name(path.name + ".gz")
    return next((p for p in (path, zipped) if p.is_file()), None)


def _read_part(folder: Path, part: str) -> Samples:
    paths = []
    for name in _names(part):
        path = _existing(folder / name)
        if path is None:
            raise FedhmError(f"{folder} holds neither {name} nor {name}.gz")
        paths.append(path)
    images, labels = _read_idx(paths[0], dimensions=3), _read_idx(paths[1], dimensions=1)
    if len(images) != len(labels):
        raise FedhmError(f"{paths[0]} holds {len(images)} images but {paths[1]} holds {len(labels)} labels")
    if labels.max() >= CLASSES:
        raise FedhmError(f"{paths[1]} holds the label {labels.max()}, but labels go from 0 to {CLASSES - 1}")
    return Samples(images.unsqueeze(1), labels.long())


def _read_idx(path: Path, dimensions: int) -> Tensor:
    content = _content(path)
    header = struct.Struct(f">HBB{dimensions}I")
    if len(content) < header.size:
        raise FedhmError(f"{path} is not an IDX file: {len(content)} bytes are too few for a header")
    zeros, type_code, found, *shape = header.unpack_from(content)
    if zeros != 0:
        raise FedhmError(f"{path} is not an IDX file: it must begin with two zero bytes")
    if type_code != UNSIGNED_BYTE:
        raise FedhmError(f"{path} holds values of type 0x{type_code:02x}, not unsigned bytes (0x08)")
    if found != dimensions:
        raise FedhmError(f"{path} holds an array of {found} dimensions where {dimensions} are needed")
    if prod(shape) == 0:
        raise FedhmError(f"{path} holds no values: its dimensions are {tuple(shape)}")
    length = len(content) - header.size
    if length != prod(shape):
        raise FedhmError(
            f"{path} is {'truncated' if length < prod(shape) else 'too long'}: "
            f"its header announces {prod(shape)} bytes but {length} follow"
        )
    # the copy is writable, which torch asks for
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header.size).reshape(shape).copy())


def _content(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(MOST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FedhmError(f"{path} cannot be read: {error}") from error
    if len(content) > MOST:
        raise FedhmError(f"{path} is not one of the official files: it has more than {MOST >> 20} MB")
    return content
