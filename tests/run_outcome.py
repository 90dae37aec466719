"""What a run leaves that must be the same, however it came about."""

import json
from pathlib import Path
from typing import Any


def outcome(folder: Path) -> dict[str, Any]:
    """All that must be the same: final models byte by byte, and records but for their times."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in (folder / "models").iterdir()}
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    for record in records:
        del record["seconds"], record["digest"]  # which covers the seconds
    return {**found, "records": records, "checkpoint": max((folder / "checkpoints").iterdir()).read_bytes()}
