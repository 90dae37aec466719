"""`fedhm init` writes a config that is ready to run, `fedhm presets` shows presets."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedhm.cli import main
from fedhm.config.loading import load_config, parse
from fedhm.config.presets import presets
from fedhm.config.schema import Config

CHOSEN = {"train.epochs", "train.batch"}  # whose defaults the comments name


@pytest.fixture
def starter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "mine.toml"
    assert main(["init", str(path)]) == 0
    assert capsys.readouterr().out == f"{path} is written: 'fedhm run {path}' runs it\n"
    return path


def test_the_starter_has_every_section_and_defaults(starter: Path) -> None:
    table = tomllib.loads(starter.read_text())
    assert table.keys() == Config.model_fields.keys()
    found, default = load_config(str(starter)).dotted(), parse({"data": {}, "model": {}}, "").dotted()
    differing = {key for key, value in found.items() if key in default and default[key] != value}
    assert differing == CHOSEN
    for key in CHOSEN:
        name = key.partition(".")[2]
        assert re.search(rf"^{name} = .*\(default: {default[key]}\)", starter.read_text(), re.MULTILINE)


def test_its_commented_settings_load_too(starter: Path) -> None:
    text = starter.read_text()
    uncommented = re.sub(r"^# (?=[a-z_]+ = |\[\[)", "", text, flags=re.MULTILINE)
    config = parse(tomllib.loads(uncommented), "all of it")
    assert config.federation.devices[0].name == "phone"
    default = parse({"data": {}, "model": {}}, "").dotted()
    examples = {"data.folder", "stop.target", "federation.devices"}  # which have no default
    differing = {key for key, value in config.dotted().items() if default.get(key) != value}
    assert differing - {key for key in differing if key.startswith(("compare.", "tracking."))} == CHOSEN | examples


def test_nothing_is_overwritten(starter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starter.write_text("seed = 3\n")
    assert main(["init", str(starter)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert starter.read_text() == "seed = 3\n"


@pytest.mark.parametrize(
    ("name", "sentence"), [("mine", "ends in .toml: 'fedhm init "), ("file/x.toml", "file is a file; choose another")]
)
def test_a_wrong_name_is_a_sentence(
    name: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["init", str(tmp_path / name)]) == 1
    assert sentence in capsys.readouterr().err


def test_a_preset_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "digits"]) == 0
    assert capsys.readouterr().out == presets()["digits"]
    assert main(["presets", "digts"]) == 1
    assert capsys.readouterr().err == "fedhm: there is no preset 'digts': did you mean 'digits'?\n"


def test_a_reader_may_go_away(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'from fedhm.cli import command; command()' presets"
    script = f"set -o pipefail; {command} 2>{tmp_path / 'said'} | true"
    assert subprocess.run(["bash", "-c", script], check=False).returncode == 0
    assert not (tmp_path / "said").read_text()
