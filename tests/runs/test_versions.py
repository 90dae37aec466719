"""A run's folder says which version wrote it; one in another format is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fedhm
from conftest import small_config, small_model
from fedhm.cli import main
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.runs import folder as folder_module
from fedhm.runs.fingerprint import fingerprint
from fedhm.runs.folder import RunFolder, read_settings
from run_outcome import edit_sealed

SETTINGS: dict[str, dict[str, Any]] = {
    "federation": {"participation": 0.5},
    "train": {"rounds": 3, "batch": 8, "lr": 0.05},
    "engine": {"threads": 1},
}
pytestmark = pytest.mark.usefixtures("without_figures")


def test_a_folder_names_its_version(federation: Federation, tmp_path: Path) -> None:
    fedhm.run(small_model(), federation.clients, federation.test, SETTINGS, tmp_path)
    assert (
        (tmp_path / "config.toml")
        .read_text()
        .startswith(f"# fedhm {fedhm.__version__} began this run (folder format 3)\n")
    )
    assert read_settings(tmp_path).versions == (fedhm.__version__,)
    assert read_settings(tmp_path).version_remark == ""


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        ("", "was written by a version of fedhm before 0.2, and"),
        ("# fedhm 0.2.0.dev0 began this run (folder format 2)\n", "was written in folder format 2, and"),
        ("# fedhm 0.2.0.dev0 began this run\n", "was written by a version of fedhm before 0.2, and"),
        ("# fedhm 99.1 began this run (folder format 4)\n", "was written in folder format 4, and"),
    ],
)
def test_a_folder_in_another_format_is_refused_in_one_sentence(
    first: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder.create(tmp_path / "run", small_config().resolved()):
        pass
    file = tmp_path / "run" / "config.toml"
    file.write_text(first + file.read_text().partition("\n")[2])
    for verb in ("resume", "report", "export"):
        assert main([verb, str(tmp_path / "run")]) == 1
        said = capsys.readouterr().err
        assert said == (
            f"fedhm: {tmp_path / 'run'} {sentence} fedhm {fedhm.__version__} reads format 3 only: use the version that "
            "wrote it, or start the run again in another folder\n"
        )


def test_what_is_set_otherwise_is_another_run_and_the_version_is_named(federation: Federation, tmp_path: Path) -> None:
    fedhm.run(small_model(), federation.clients, federation.test, SETTINGS, tmp_path)
    file = tmp_path / "config.toml"
    edit_sealed(file, (f"# fedhm {fedhm.__version__} ", "# fedhm 0.2.7 "))
    for section, key, value, old in (("train", "nested", 0.25, 0.5), ("train", "lr", 0.07, 0.05)):
        changed = {**SETTINGS, section: {**SETTINGS[section], key: value}}
        sentence = rf"holds a run with other settings, {section}.{key} = {old}, not {value}: choose another folder"
        with pytest.raises(FedhmError, match=rf"{sentence} \(the folder was written by fedhm 0\.2\.7, this is fedhm"):
            fedhm.run(small_model(), federation.clients, federation.test, changed, tmp_path)
    with pytest.raises(FedhmError, match=r"belongs to another run, .* written by fedhm 0\.2\.7"):
        fedhm.run(small_model(seed=1), federation.clients, federation.test, SETTINGS, tmp_path)


def test_another_setting_makes_another_identity(federation: Federation) -> None:
    config, weights = small_config(**SETTINGS).resolved(), {"w": torch.ones(1)}
    slower = config.model_copy(update={"train": config.train.model_copy(update={"lr": 0.01})})
    assert fingerprint(config, weights, federation) == fingerprint(config, weights, federation)
    assert fingerprint(config, weights, federation) != fingerprint(slower, weights, federation)


def test_a_folder_of_a_later_version_is_refused_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder.create(tmp_path, small_config().resolved()):
        pass
    file = tmp_path / "config.toml"
    edit_sealed(file, (f"# fedhm {fedhm.__version__} ", "# fedhm 99.1 "), ("[train]\n", "[train]\nwarp = 9\n"))
    assert main(["resume", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "unknown key 'train.warp'" in said
    assert f"(the folder was written by fedhm 99.1, this is fedhm {fedhm.__version__})" in said


def test_versions_that_resume_are_noted_in_their_order(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fedhm.run(small_model(), federation.clients, federation.test, SETTINGS, tmp_path)
    for number in ("0.2", "0.3", "0.3"):
        monkeypatch.setattr(folder_module, "version", lambda _, number=number: number)
        fedhm.run(small_model(), federation.clients, federation.test, SETTINGS, tmp_path)
    assert read_settings(tmp_path).versions == (fedhm.__version__, "0.2", "0.3")
