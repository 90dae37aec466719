"""Data sets are fetched into the layouts that the loaders read: whole, checked, or not at all."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedhm.cli import main
from fedhm.data import fetch as fetching
from fedhm.data.fetch import FETCHED, _check_content
from fedhm.data.samples import Samples, Source
from fedhm.data.sources import SOURCES, read_source
from fedhm.errors import FedhmError

CLASSES = {"cifar10": 10, "cifar100": 100, "fashion-mnist": 10, "tinyimagenet": 4}


def stand_in(name: str, folder: Path) -> dict[str, Any]:
    """Write parquet files as Hugging Face has them for a data set, of few random images, and return these."""
    import datasets

    names = [f"n{number:08}" for number in range(CLASSES[name])]
    channels, height, width = SOURCES[name].shape
    image, label = ("img", "fine_label" if name == "cifar100" else "label")
    image = image if name.startswith("cifar") else "image"
    features = {image: datasets.Image(), label: datasets.ClassLabel(names=names)}
    rng, made = np.random.default_rng(0), {}
    folder.mkdir()
    for split, count in (("train", 2 * len(names)), ("valid" if name == "tinyimagenet" else "test", len(names))):
        shape = (count, height, width, 3) if channels == 3 else (count, height, width)
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        labels = [number % len(names) for number in range(count)]
        columns: dict[str, Any] = {image: [Image.fromarray(each) for each in pixels], label: labels}
        if name == "cifar100":
            columns["coarse_label"] = [fetching.COARSE[number].item() for number in labels]
            features["coarse_label"] = datasets.ClassLabel(names=[str(number) for number in range(20)])
        written = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
        written.to_parquet(folder / f"{split}-00000-of-00001.parquet")
        made[split if split == "train" else "test"] = pixels.reshape(count, height, width, channels), labels
    return made


@pytest.mark.parametrize("name", FETCHED)
def test_what_is_fetched_is_what_the_loader_reads(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = stand_in(name, tmp_path / "hub")
    out = tmp_path / "out"
    assert main(["data", name, "--from", str(tmp_path / "hub"), "--to", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"{out} holds {name}: {2 * CLASSES[name]} training and {CLASSES[name]} test samples" in said
    assert f"--set data.folder={out}' uses it" in said
    read = read_source(name, out)
    for samples, split in ((read.train, "train"), (read.test, "test")):
        pixels, labels = made[split]
        order = np.argsort(labels, kind="stable") if name == "tinyimagenet" and split == "train" else slice(None)
        assert np.array_equal(samples.tensor.permute(0, 2, 3, 1).numpy(), pixels[order])
        assert samples.labels.tolist() == np.array(labels)[order].tolist()
    assert not list(out.glob(".fetching*"))
    checked = subprocess.run(["sha256sum", "-c", "--quiet", f"{name}.sha256"], cwd=out, check=False)
    assert checked.returncode == 0
    assert main(["data", name, "--from", str(tmp_path / "hub"), "--to", str(out)]) == 1
    assert f"holds files of {name} already" in capsys.readouterr().err


def test_other_images_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in("fashion-mnist", tmp_path / "hub")
    assert main(["data", "cifar10", "--from", str(tmp_path / "hub"), "--to", str(tmp_path / "out")]) == 1
    assert "images of 1×28×28 pixels of 10 classes, not 3×32×32" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_an_interruption_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Path) -> str:
        raise KeyboardInterrupt

    stand_in("cifar10", tmp_path / "hub")
    monkeypatch.setattr(fetching, "_sha256", interrupted)  # the last step before the files get their place
    assert main(["data", "cifar10", "--from", str(tmp_path / "hub"), "--to", str(tmp_path / "out")]) == 130
    assert not list((tmp_path / "out").iterdir())


def test_one_process_fetches_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in("cifar10", tmp_path / "hub")
    with fetching._workshop(tmp_path, "cifar10"):
        assert main(["data", "cifar10", "--from", str(tmp_path / "hub"), "--to", str(tmp_path)]) == 1
    assert "another process is fetching cifar10" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True], ids=["refused", "silent"])
def test_without_a_network_it_says_what_to_put_where_at_once(answers: bool, tmp_path: Path) -> None:
    """A hub that nobody serves, and one that accepts connections but never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen()
        hub = f"http://127.0.0.1:{server.getsockname()[1]}"
        script = "import sys, fedhm.cli, fedhm.data.fetch as f; f.TIMEOUT = 1.0; sys.exit(fedhm.cli.main())"
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", script, "data", "cifar10", "--to", "here"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"},
        )
    assert time.monotonic() - began < 60  # mostly imports, on a busy machine
    assert done.returncode == 1
    assert done.stderr.startswith(f"fedhm: cifar10 cannot be fetched, because {hub} does not give uoft-cs/cifar10 (")
    assert "put cifar-10-batches-bin/data_batch_1.bin to data_batch_5.bin and" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_offline_it_says_what_to_put_where(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedhm", "data", "cifar100", "--to", "here"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
    )
    assert done.returncode == 1
    assert "Or put cifar-100-binary/train.bin and cifar-100-binary/test.bin into here yourself" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_package_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetching, "find_spec", lambda _: None)
    assert main(["data", "cifar100", "--to", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "pip install '.[hf]'" in said
    assert "or put cifar-100-binary/train.bin and cifar-100-binary/test.bin into" in said


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("digits", "nothing to fetch"), ("cifar", "did you mean 'cifar10'?"), ("x", "known are cifar10")],
)
def test_other_names_are_a_sentence(name: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", name]) == 1
    assert sentence in capsys.readouterr().err


def test_content_that_was_not_published_is_refused() -> None:
    known = FETCHED["cifar10"]
    levels = torch.tensor([round(255 * mean) for mean in known.mean], dtype=torch.uint8).view(1, 3, 1, 1)
    images = levels.expand(50_000, 3, 1, 1).contiguous()
    labels = torch.arange(50_000) % 10

    def check(images: torch.Tensor, labels: torch.Tensor) -> None:
        samples = Samples(images, labels)
        _check_content("cifar10", known, Source(samples, samples, 10, (), ()))

    check(images, labels)
    with pytest.raises(FedhmError, match="4999 to 5001 of each class"):
        check(images, torch.cat([labels[:-1], torch.tensor([0])]))
    with pytest.raises(FedhmError, match="the mean of its channels is"):
        check(images.flip(1), labels)  # blue, green, red
