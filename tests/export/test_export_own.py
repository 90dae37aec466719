"""A network of one's own as a file, from Python, and what cannot be one."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedhm
from fedhm.export import formats, write
from fedhm.export.formats import FACTS_FILE, FORMATS, open_session
from fedhm.export.source import ExportSource
from fedhm.lowrank.hybrid import to_hadamard, to_hybrid

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()


@pytest.mark.slow
def test_onnx_is_read_back_by_its_runtime(tmp_path: Path) -> None:
    done = fedhm.export(small(), (6,), out=tmp_path, samples=(X, Y), classes=["a", "b", "ü"])
    assert done.path == tmp_path / "model.onnx"
    assert (done.random, done.int8) == (False, False)
    assert done.difference < 1e-5
    accuracy = float((small()(X).argmax(1) == Y).float().mean())
    assert done.metrics["accuracy"] == pytest.approx(accuracy)
    session = open_session(done.path)
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["classes"]) == ["a", "b", "ü"]
    assert [entry.shape[1] for entry in (*session.get_inputs(), *session.get_outputs())] == [6, 3]
    for count in (1, 7):
        torch.testing.assert_close(FORMATS["onnx"].load(done.path)(X[:count]), small()(X[:count]).detach())
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_pt2_takes_raw_images_and_random_ones_are_said(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 9, 3)).eval()
    done = fedhm.export(network, (2, 5, 5), to="torch", out=tmp_path, mean=(0.3, 0.5), std=(0.2, 0.1), classes="abc")
    assert done.random
    assert done.metrics == {}
    images = torch.randint(0, 256, (5, 2, 5, 5), dtype=torch.uint8)
    normalised = fedhm.Preprocessing((0.3, 0.5), (0.2, 0.1)).normalise(images.permute(0, 2, 3, 1).contiguous())
    torch.testing.assert_close(FORMATS["torch"].load(done.path)(images), network(normalised).detach())
    extra = {FACTS_FILE: ""}
    torch.export.load(done.path, extra_files=extra)
    assert json.loads(json.loads(extra[FACTS_FILE])["classes"]) == ["a", "b", "c"]


@pytest.mark.parametrize("make", [to_hybrid, partial(to_hadamard, generator=torch.Generator().manual_seed(0))])
def test_convolutions_of_signals_in_any_form(make: Callable[..., nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Conv1d(2, 12, 5, padding=2), nn.BatchNorm1d(12), nn.Conv1d(12, 12, 3, stride=2, dilation=2)
    network = make(nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 8, 3)), {"0": 2, "2": 3}).eval()
    done = fedhm.export(network, (2, 20), to="torch", out=tmp_path)
    x = torch.randn(4, 2, 20)
    torch.testing.assert_close(FORMATS["torch"].load(done.path)(x), network(x).detach())


def test_regression_has_its_own_metrics_and_no_classes(tmp_path: Path) -> None:
    network = nn.Linear(6, 1)
    done = fedhm.export(network, (6,), out=tmp_path, samples=(X, X.sum(1)), objective="regression")
    assert "r2" in done.metrics
    assert "classes" not in open_session(done.path).get_modelmeta().custom_metadata_map


@pytest.mark.slow
def test_eight_bits_are_measured(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)).eval()
    labels = network(X).argmax(1)
    done = fedhm.export(network, (6,), out=tmp_path, samples=(X, labels), int8=True, classes="abc")
    assert done.path.name == "model.int8.onnx"
    assert 0 < done.difference < 0.2
    assert 0.8 < done.metrics["accuracy"] <= 1
    facts = open_session(done.path).get_modelmeta().custom_metadata_map
    assert (facts["precision"], json.loads(facts["classes"])) == ("int8", ["a", "b", "c"])


@pytest.mark.slow
def test_executorch_is_read_back_by_its_runtime(tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    images = torch.randint(0, 256, (40, 2, 6, 6), dtype=torch.uint8)
    network = nn.Sequential(nn.Conv2d(2, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)).eval()
    norm = {"mean": (0.5, 0.5), "std": (0.2, 0.2)}
    done = fedhm.export(network, (2, 6, 6), to="executorch", out=tmp_path, samples=(images, Y), classes="abc", **norm)
    assert done.difference < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pte", "model.pte.json"]


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class FixedBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, 6) * 2


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("network", "options", "sentence"),
    [
        (Deciding(), {}, "cannot be exported, since torch.export cannot follow"),
        (FixedBatch(), {}, "cannot be exported|does not accept"),
        (Pair(), {}, "must give a tensor, not a tuple"),
        (nn.Linear(5, 3), {}, "does not accept one input of shape"),
        (nn.Linear(6, 3), {"to": "tflite"}, "there is no format 'tflite', known are onnx, torch, executorch"),
        (nn.Linear(6, 3), {"tier": "1/8"}, "tier= is for the folder of a run"),
        (nn.Linear(6, 3), {"sample_shape": None}, "say the shape of one input"),
        (nn.Linear(6, 3), {"classes": "ab"}, "3 outputs, but there are 2 names"),
        (nn.Linear(6, 3), {"int8": True}, "8 bits need samples"),
        (nn.Linear(6, 3), {"int8": True, "to": "torch", "samples": (X, Y)}, "is for onnx"),
        (nn.Linear(6, 3), {"samples": (X[:, :5], Y)}, r"inputs of shape \(5,\), not \(6,\)"),
        (nn.Linear(6, 3), {"samples": (X.to(torch.uint8), Y)}, "uint8 images need mean and std"),
        (nn.Linear(6, 3), {"mean": [0.5], "std": [0.5]}, "a number for each of the 6 channels"),
    ],
)
def test_what_cannot_be_exported_is_a_sentence(
    network: nn.Module, options: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(fedhm.FedhmError, match=sentence):
        fedhm.export(network, **({"sample_shape": (6,), "out": tmp_path / "new"} | options))  # type: ignore[arg-type]
    assert not list(tmp_path.glob("new/*"))


def test_a_format_that_is_not_installed_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(fedhm.FedhmError, match=r"onnxscript has to be installed: pip install '\.\[export\]'"):
        fedhm.export(small(), (6,), out=tmp_path)


def test_a_file_that_its_runtime_cannot_run_is_not_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(path: Path, threads: int = 0) -> object:  # noqa: ARG001
        raise RuntimeError("error 0x10\nsomewhere")

    monkeypatch.setattr(FORMATS["torch"], "load", broken)
    with pytest.raises(fedhm.FedhmError, match="torch cannot run the model of model: error 0x10 somewhere; nothing"):
        fedhm.export(small(), (6,), to="torch", out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_its_runtime_reads_otherwise_is_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(write, "TOLERANCE", -1.0)
    (tmp_path / "model.pt2").write_text("an older one")
    with pytest.raises(fedhm.FedhmError, match="gives other outputs than the network"):
        fedhm.export(small(), (6,), to="torch", out=tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["an older one"]


def test_a_tier_that_is_a_budget_has_a_file_that_every_system_takes(tmp_path: Path) -> None:
    done = write.write(ExportSource(small(), "memory:5MB,bytes:1/8", X, random=True), "torch", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [done.path.name] == ["memory-5MB,bytes-1-8.pt2"]
    extra = {FACTS_FILE: ""}
    torch.export.load(done.path, extra_files=extra)
    assert json.loads(extra[FACTS_FILE])["tier"] == "memory:5MB,bytes:1/8"


@pytest.mark.parametrize("shape", ["text", 3, (3, "x"), (0, 4)])
def test_what_is_no_shape_is_one_sentence(shape: object) -> None:
    with pytest.raises(
        fedhm.FedhmError, match=r"sample_shape must be the shape of one input, such as \(3, 32, 32\), not"
    ):
        fedhm.export(nn.Linear(4, 3), shape)  # type: ignore[arg-type]
