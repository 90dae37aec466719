"""Tensors as bytes: safetensors files with a JSON header, and digests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedhm.machine.files import check_utf8_name, open_regular, write_atomically
from fedhm.machine.seal import UNSEALED, NoSealError, check_seal, seal

Found = TypeVar("Found")


def write_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write a sealed safetensors file. Its header is one JSON text: the order of several entries would be random.

    The file is either complete or not there.
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(path, seal(save(contiguous, {"fedhm": json.dumps({"seal": UNSEALED, **header})})))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and header.

    A file by another program has an empty header. A damaged file raises ValueError, an unreadable one OSError.
    """
    return _read(path, lambda file, name: cast(Tensor, file.get_tensor(name)))


def read_shapes(path: Path) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Read as `read_tensors` does, but the shapes of the tensors in place of their values."""
    return _read(path, lambda file, name: cast(list[int], file.get_slice(name).get_shape()))


def _read(path: Path, what: Callable[[Any, str], Found]) -> tuple[dict[str, Found], dict[str, Any]]:
    check_utf8_name(path)
    with open_regular(path) as opened:  # an OSError says what is wrong with the place: safetensors calls it damage
        try:
            check_seal(opened)
            sealed = True
        except NoSealError:
            sealed = False
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("fedhm", "{}"))
            found = {name: what(file, name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")
    if header and not sealed:  # another program's file has neither
        raise ValueError("it has no checksum")
    header.pop("seal", None)
    return found, header


class Digest(Protocol):
    """Any hash of `hashlib`."""

    def update(self, data: Any, /) -> None: ...


def update_digest(digest: Digest, tensor: Tensor, label: str = "") -> None:
    """Add a label and the bytes of a tensor to a digest. Digests by this function are on disk: it must not change."""
    digest.update(label.encode())
    digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
