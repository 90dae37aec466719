"""Seals: a file that carries the checksum of its own content.

A sealed file has `sha256:` and 64 digits near its beginning. The digits are the SHA-256 of the whole file with zeros in
their place. So every bit of the file is covered, in any format that has room for a short text: JSON, TOML, safetensors.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fedhm.machine.files import open_regular, read_regular, write_atomically

UNSEALED = "sha256:" + 64 * "0"  # written where the seal goes
_SEAL = re.compile(rb"sha256:([0-9a-f]{64})")
_HEAD = 4096  # bytes in which the seal begins and ends
_CHUNK = 1 << 20


def seal(content: bytes) -> bytes:
    """Return the content with its checksum in place of the first `UNSEALED`."""
    start = content.index(UNSEALED.encode(), 0, _HEAD)
    digest = hashlib.sha256(content).hexdigest()
    return content[:start] + f"sha256:{digest}".encode() + content[start + len(UNSEALED) :]


def seal_again(content: bytes) -> bytes:
    """Return content that was sealed, and changed since, with a new seal."""
    return seal(_SEAL.sub(UNSEALED.encode(), content, count=1))


class NoSealError(ValueError):
    """A file carries no seal: another program wrote it, or the seal itself is damaged."""


def check_seal(file: BinaryIO) -> None:
    """Raise ValueError if a file is not as it was sealed."""
    head = file.read(_HEAD)
    found = _SEAL.search(head)
    if found is None:
        raise NoSealError("it has no checksum")
    digest = hashlib.sha256(head[: found.start(1)] + 64 * b"0" + head[found.end(1) :])
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    if digest.hexdigest().encode() != found[1]:
        raise ValueError("its checksum differs")


def read_sealed(path: Path) -> bytes:
    """Return the content of a sealed file. A damaged one raises ValueError, an unreadable one OSError."""
    with open_regular(path) as file:
        check_seal(file)
        file.seek(0)
        return file.read()


def write_sealed_json(path: Path, table: Mapping[str, Any]) -> None:
    write_atomically(path, seal((json.dumps({"seal": UNSEALED, **table}, indent=2) + "\n").encode()))


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Return the table of a sealed JSON file. A damaged one raises ValueError, an unreadable one OSError."""
    table = json.loads(read_sealed(path))
    if not isinstance(table, dict):
        raise ValueError("it is no table")
    table.pop("seal", None)
    return table


# Files in formats without room for a seal, such as CSV and PNG, have their checksums in a sealed file beside them.


@dataclass(frozen=True)
class Checksums:
    sha256: dict[str, str]  # by file name
    run: str  # the fingerprint of the run that the files are about; empty: of several


def write_checksums(file: Path, paths: Iterable[Path], run: str = "") -> None:
    """Write the checksums of files in the same folder."""
    found = {path.name: hashlib.sha256(read_regular(path)).hexdigest() for path in dict.fromkeys(paths)}
    write_sealed_json(file, vars(Checksums(found, run)))


def read_checksums(file: Path) -> Checksums:
    """Return the checksums of files. A damaged list raises ValueError, an unreadable one OSError."""
    table = read_sealed_json(file)
    return Checksums(dict(table.get("sha256", {})), str(table.get("run", "")))


def check_checksum(path: Path, digest: str) -> None:
    """Raise ValueError if a file does not have this checksum."""
    if hashlib.sha256(read_regular(path)).hexdigest() != digest:
        raise ValueError("its checksum differs")
