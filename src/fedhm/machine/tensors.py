"""Files of tensors with a JSON header, in safetensors: whole, or not there at all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedhm.machine.files import check_utf8_name, write_atomically

Found = TypeVar("Found")


def write_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write a safetensors file. Its header is one JSON text: the order of several entries would differ by chance."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(contiguous, {"fedhm": json.dumps(header)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and header; a file by others has an empty header, a damaged one raises ValueError.

    One that cannot be read at all, damaged or not, raises OSError.
    """
    return _read(path, lambda file, name: cast(Tensor, file.get_tensor(name)))


def read_shapes(path: Path) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Read the shapes of the tensors in place of their values, as `read_tensors` does otherwise."""
    return _read(path, lambda file, name: cast(list[int], file.get_slice(name).get_shape()))


def _read(path: Path, what: Callable[[Any, str], Found]) -> tuple[dict[str, Found], dict[str, Any]]:
    check_utf8_name(path)
    with path.open("rb"):  # which says what is wrong with the place: safetensors calls much of it damage
        pass
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
    return found, header
