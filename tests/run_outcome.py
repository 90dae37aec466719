"""What a run leaves that must be the same, however it came about."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from fedhm.machine.seal import seal_again


def outcome(folder: Path) -> dict[str, Any]:
    """All that must be the same: final models byte by byte, and records but for their times."""
    models = folder / "models"
    files = [path for path in models.rglob("*") if path.is_file()]
    found: dict[str, Any] = {path.relative_to(models).as_posix(): path.read_bytes() for path in files}
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    for record in records:
        del record["seconds"], record["digest"]  # which covers the seconds
    return {**found, "records": records, "checkpoint": max((folder / "checkpoints").iterdir()).read_bytes()}


def edit_sealed(file: Path, *changes: tuple[str, str]) -> None:
    """Change a sealed file and seal it again, as another version of the library might have written it."""
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    file.write_bytes(seal_again(text.encode()))


def weights(file: Path) -> dict[str, bytes]:
    """Return the tensors of a model's file. Its header names the run, and the same run on another engine is another."""
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}
