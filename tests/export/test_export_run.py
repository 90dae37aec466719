"""`fedhm export`: the tiers of a run as files, with their cards, and the folders that are refused."""

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import fedhm
import forked
from fedhm.cli import main
from fedhm.data.images import read_digits
from fedhm.export.formats import FORMATS, open_session
from fedhm.runs.rounds import read_records

TINY = ["train.rounds=1", "train.epochs=1", "model.width=0.25", "federation.clients=4"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["run", "digits", "--set", *TINY, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def exported(finished: Path) -> Path:
    assert main(["export", str(finished), "--tier", "1/8", "full", "--int8", "--card"]) == 0
    return finished / "export"


@pytest.mark.slow
def test_raw_images_go_in_and_the_runs_scores_come_out(finished: Path, exported: Path) -> None:
    model = fedhm.models.MODELS["cnn"](num_classes=10, in_channels=1, width=0.25)
    network = fedhm.load_tier(finished / "models" / "1-8.safetensors", model)
    source = read_digits()
    images = source.test.inputs[:50]
    normalised = fedhm.Preprocessing(source.mean, source.std).normalise(images.permute(0, 2, 3, 1).contiguous())
    found = FORMATS["onnx"].load(exported / "1-8.onnx")(images)
    torch.testing.assert_close(found, network(normalised).detach(), rtol=1e-4, atol=1e-5)
    facts = open_session(exported / "1-8.onnx").get_modelmeta().custom_metadata_map
    assert json.loads(facts["classes"]) == [str(number) for number in range(10)]
    assert facts["training"] == "fedhm, 1 rounds, seed 0"
    (record,) = read_records(finished / "records.jsonl")
    assert f"{100 * record.metrics['1/8'].accuracy:.2f} %" in (exported / "card-1-8.md").read_text()


@pytest.mark.slow
def test_cards_have_all_that_was_measured(exported: Path) -> None:
    assert {path.name for path in exported.iterdir()} == {
        "1-8.onnx", "1-8.int8.onnx", "full.onnx", "full.int8.onnx",
        "card-1-8.md", "card-full.md", "cards.md", "cards.png",
    }  # fmt: skip
    text = (exported / "cards.md").read_text()
    for tier, kind in (("1/8", "fp32"), ("1/8", "int8"), ("full", "fp32"), ("full", "int8")):
        numbers = r"[\d.]+ kB \| [\d,]+ \| [\d.]+ k \| \d+\.\d\d % \| \d+\.\d+ ms \| [\d.]+ (kB|MB)"
        assert re.search(rf"\| {tier} \| onnx {kind} \| {numbers} \|", text), text
    assert "raw images, uint8 (N, C, H, W) of 1×8×8" in (exported / "card-1-8.md").read_text()
    with Image.open(exported / "cards.png") as picture:
        assert len(picture.convert("RGB").getcolors(2**24) or []) > 50  # something is drawn


@pytest.mark.slow
def test_ctrl_c_ends_it_at_once_and_leaves_nothing_half_written(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forked.fedhm(["export", str(finished), "--out", str(out), "--int8"], **streams) as process:
        while not list(out.glob(".writing-*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "\nfedhm: stopped\n")
    assert not list(out.glob(".*"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["export", *arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith("fedhm: ")
    assert "Traceback" not in said
    return said


def test_folders_and_tiers_that_are_refused(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no folder" in refused(capsys, str(tmp_path / "nowhere"))
    assert "config.toml" in refused(capsys, str(tmp_path))
    assert "has no tier '1/3', only full, 1/2, 1/4, 1/8" in refused(capsys, str(finished), "--tier", "1/3")
    assert "--to takes onnx or torch or executorch, not 'tflite'" in refused(capsys, str(finished), "--to", "tflite")
    assert "goes with --to onnx" in refused(capsys, str(finished), "--to", "torch", "--int8")
    assert "there are 10 classes, but 2 names" in refused(capsys, str(finished), "--classes", "a", "b")
    unfinished = tmp_path / "unfinished"
    shutil.copytree(finished, unfinished)
    (unfinished / "models" / "1-8.safetensors").unlink()
    assert f"is not finished, so it has no models yet: 'fedhm resume {unfinished}'" in refused(capsys, str(unfinished))
    with pytest.raises(fedhm.FedhmError, match="name the tier"):
        fedhm.export(finished)
    with pytest.raises(fedhm.FedhmError, match="are for a network"):
        fedhm.export(finished, (1, 8, 8), tier="1/8")


def test_a_run_of_ones_own_model_is_exported_from_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    settings = {"train": {"rounds": 1}, "method": {"tiers": [1]}}
    result = fedhm.run(nn.Linear(4, 2), [(x, y)], (x, y), settings, out=tmp_path / "own")
    assert "export its networks from Python" in refused(capsys, str(tmp_path / "own"))
    done = fedhm.export(result.networks["full"], (4,), to="torch", out=tmp_path, samples=(x, y))
    assert done.metrics["accuracy"] == pytest.approx(result.metrics["full"].accuracy)
