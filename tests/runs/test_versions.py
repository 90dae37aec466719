"""A run's folder says which version wrote it; one that an earlier version began is resumed as it was begun."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.cli import main
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.runs import folder as begun_module
from fedhm.runs.fingerprint import fingerprint
from fedhm.runs.folder import RunFolder, read_begun, read_config
from fedhm.runs.records import read_records

# settings of which an earlier version knew nothing
NEW = ("nested", "nested_form", "nested_tier", "start", "band_speed", "robust", "attackers", "trim")
SETTINGS: dict[str, dict[str, Any]] = {
    "federation": {"participation": 0.5},
    "train": {"rounds": 3, "batch": 8, "lr": 0.05},
    "engine": {"threads": 1},
}
pytestmark = pytest.mark.usefixtures("without_figures")


def make_earlier(folder: Path) -> None:
    """Leave only what an earlier version would have written into a run's config: fewer settings, and no version."""
    file = folder / "config.toml"
    text = file.read_text()
    for key in NEW:
        text, count = re.subn(rf"^{key} = .*\n", "", text, flags=re.MULTILINE)
        assert count == 1
    text = re.sub(r"^#.*\n|\n\[checkpoints\]\n.*\n", "", text, flags=re.MULTILINE)
    file.write_text(text)


def interrupted(federation: Federation, path: Path, rounds: int) -> None:
    """Leave a run of an earlier version that was killed after so many rounds."""
    config = small_config(**{**SETTINGS, "federation": {"clients": 8, "participation": 0.5}}).resolved()
    with RunFolder.create(path, config):
        pass
    make_earlier(path)
    with RunFolder.open(path) as folder:
        experiment = assemble(small_model(), federation, folder.config)
        experiment.config = experiment.config.model_copy(
            update={"train": experiment.config.train.model_copy(update={"rounds": rounds})}
        )
        experiment.run(folder)
    make_unsigned(path)


def make_unsigned(path: Path) -> None:
    file = path / "config.toml"
    file.write_text(re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE))


def test_a_folder_names_its_version(federation: Federation, tmp_path: Path) -> None:
    fedhm.run(small_model(), federation.clients, federation.test, SETTINGS, tmp_path)
    assert (tmp_path / "config.toml").read_text().startswith(f"# fedhm {fedhm.__version__} began this run\n")
    assert read_begun(tmp_path).versions == (fedhm.__version__,)
    assert read_begun(tmp_path).remark == ""


def test_what_an_earlier_version_did_not_state_is_as_it_was_then(federation: Federation, tmp_path: Path) -> None:
    interrupted(federation, tmp_path, 1)
    config = read_config(tmp_path)
    assert (config.train.nested, config.method.start, config.checkpoints.keep) == (0.0, "whole", 2)  # type: ignore[attr-defined]
    assert config.method.band_speed == 1  # type: ignore[attr-defined]
    assert (config.server.robust, small_config().resolved().server.robust) == ("none", "clip")
    fresh = small_config()
    assert (fresh.train.nested, fresh.method.start, fresh.method.band_speed) == (0.5, "whole", 0.5)  # type: ignore[attr-defined]


def test_a_run_of_an_earlier_version_is_finished_as_it_was_begun(federation: Federation, tmp_path: Path) -> None:
    as_then = {**SETTINGS, "train": {**SETTINGS["train"], "nested": 0}, "method": {"start": "whole", "band_speed": 1}}
    whole = fedhm.run(small_model(), federation.clients, federation.test, as_then)
    interrupted(federation, tmp_path, 2)
    finished = fedhm.run(small_model(), federation.clients, federation.test, SETTINGS, tmp_path)  # nobody sets the new
    for tier, network in whole.networks.items():
        for mine, other in zip(network.parameters(), finished.networks[tier].parameters(), strict=True):
            assert torch.equal(mine, other)
    assert f"# fedhm {fedhm.__version__} resumed it after round 2\n" in (tmp_path / "config.toml").read_text()
    assert read_begun(tmp_path).versions == (fedhm.__version__,)
    assert len(read_records(tmp_path / "records.jsonl")) == 3


def test_what_is_set_otherwise_is_another_run_and_the_version_is_named(federation: Federation, tmp_path: Path) -> None:
    interrupted(federation, tmp_path, 1)
    for section, key, value, old in (("train", "nested", 0.25, 0.0), ("train", "lr", 0.07, 0.05)):
        changed = {**SETTINGS, section: {**SETTINGS[section], key: value}}
        sentence = (
            rf"holds a run with other settings, {section}.{key} = {old}, not {value}: choose another folder \(the "
        )
        with pytest.raises(
            FedhmError, match=rf"{sentence}folder was written by an earlier version of fedhm, which did"
        ):
            fedhm.run(small_model(), federation.clients, federation.test, changed, tmp_path)
    with pytest.raises(FedhmError, match=r"belongs to another run, .* written by an earlier version of fedhm"):
        fedhm.run(small_model(seed=1), federation.clients, federation.test, SETTINGS, tmp_path)


def test_an_identity_is_that_of_the_settings_that_are_stated(federation: Federation, tmp_path: Path) -> None:
    interrupted(federation, tmp_path, 1)
    begun, weights = read_begun(tmp_path), {"w": torch.ones(1)}
    of_then = fingerprint(begun.config, weights, federation, begun.stated)
    written = (tmp_path / "config.toml").read_text()
    assert begun.config.to_toml(begun.stated) == written  # to the letter what that version wrote, and made it of
    nested = begun.config.train.model_copy(update={"nested": 0.5})
    assert of_then == fingerprint(begun.config.model_copy(update={"train": nested}), weights, federation, begun.stated)
    slower = begun.config.train.model_copy(update={"lr": 0.01})
    assert of_then != fingerprint(begun.config.model_copy(update={"train": slower}), weights, federation, begun.stated)
    assert of_then != fingerprint(begun.config, weights, federation)


def test_a_folder_of_a_later_version_is_refused_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder.create(tmp_path, small_config().resolved()):
        pass
    file = tmp_path / "config.toml"
    text = file.read_text().replace(f"# fedhm {fedhm.__version__} ", "# fedhm 99.1 ")
    file.write_text(text.replace("[train]\n", "[train]\nwarp = 9\n"))
    assert main(["resume", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "unknown key 'train.warp'" in said
    assert f"(the folder was written by fedhm 99.1, this is fedhm {fedhm.__version__})" in said


def test_versions_that_resume_are_noted_in_their_order(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fedhm.run(small_model(), federation.clients, federation.test, SETTINGS, tmp_path)
    for number in ("0.2", "0.3", "0.3"):
        monkeypatch.setattr(begun_module, "version", lambda _, number=number: number)
        fedhm.run(small_model(), federation.clients, federation.test, SETTINGS, tmp_path)
    assert read_begun(tmp_path).versions == (fedhm.__version__, "0.2", "0.3")
