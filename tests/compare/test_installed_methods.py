"""A method of another installed package is one of the names that `fedhm compare --methods` takes."""

from pathlib import Path

import pytest

from fedhm.cli import main
from fedhm.compare.execute import all_cells
from fedhm.compare.select import Reference, known_names, resolve_entries
from fedhm.config.loading import load_config
from fedhm.errors import FedhmError

MODULE = """
from typing import Literal

from fedhm import MethodConfig
from fedhm.config.method import Family, NamedEntry


class Mine(MethodConfig):
    name: Literal["mine"] = "mine"
    share: float = 0.5

    def build(self, model, setup):
        raise AssertionError

    @classmethod
    def entries(cls):
        return [
            NamedEntry("mine", lambda sizes: {"name": "mine", "share": min(sizes.ratios)}),
            Family("mine-at", lambda sizes: sizes.widths, lambda _, w: {"name": "mine", "share": w}, "{:g}".format),
        ]
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, text: str) -> None:
    """As pip would: a module, and beside it what its distribution says of itself."""
    (folder / f"{module}.py").write_text(text)
    about = folder / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[fedhm.methods]\n{name} = {module}:Mine\n")
    monkeypatch.syspath_prepend(str(folder))


def test_its_entries_are_known_and_run_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "somebodys_method", "mine", MODULE)
    assert known_names()[0] == "fedhm"
    assert known_names().index("mine") < known_names().index("lowrank") < known_names().index("mine-at")
    config = load_config("digits", ["compare.widths=[1, 0.5, 0.4, 0.2]"])
    found = resolve_entries(["mine", "mine-at"], Reference(config))
    assert {entry.label: entry.method["share"] for entry in found} == {
        "mine": 0.125, "mine-at:0.5": "0.5", "mine-at:0.4": "0.4", "mine-at:0.2": "0.2",
    }  # fmt: skip
    assert [c.config.method.model_dump() for c in all_cells(config, found[:1], 1, tmp_path, 1)] == [
        {"name": "mine", "share": 0.125}
    ]
    own = load_config("digits", ["method.name=mine", "method.share=0.75"])
    assert resolve_entries(["mine"], Reference(own))[0].method == {"name": "mine", "share": 0.75}


def test_one_that_cannot_be_loaded_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "somebodys_broken_method", "broken", "import no_such_module")
    assert main(["presets"]) == 0
    assert "broken" not in known_names()
    with pytest.raises(FedhmError, match="the method 'broken' cannot be loaded from somebodys_broken_method:Mine"):
        resolve_entries(["broken"], Reference(load_config("digits")))
