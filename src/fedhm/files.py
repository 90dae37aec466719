"""Files that are either there whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | str) -> None:
    """Writes beside `path`, brings it to disk, then takes the place of `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
