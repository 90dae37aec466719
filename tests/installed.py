"""A package of somebody else's, installed for a test: its module and metadata on the path of every process."""

import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest

from fedhm.config import registry as plugins


def install(folder: Path, source: Path, group: str, points: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the module in the file `source` importable, with entry points NAME = OBJECT of `group`."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, folder)
    metadata = folder / f"{source.stem}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {source.stem}\nVersion: 1.0\n")
    lines = [f"{name} = {source.stem}:{thing}" for name, thing in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[fedhm.{group}]", *lines, ""]))
    monkeypatch.syspath_prepend(str(folder))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(plugins, "_registered", {})
    sys.modules.pop(source.stem, None)
    importlib.invalidate_caches()
