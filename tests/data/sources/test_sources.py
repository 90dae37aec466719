import io
import struct
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedhm.data.images import read_digits
from fedhm.data.sources import SOURCES, read_source
from fedhm.errors import FedhmError

MISSING = {
    "fashion-mnist": "Debian's package dataset-fashion-mnist",
    "cifar10": "download cifar-10-binary.tar.gz from the CIFAR page of the University of Toronto",
    "cifar100": "download cifar-100-binary.tar.gz from the CIFAR page of the University of Toronto",
    "tinyimagenet": "download tiny-imagenet-200.zip",
}


def write_cifar100(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, label in (("train.bin", 42), ("test.bin", 99)):
        (folder / name).write_bytes(bytes([1, label]) + bytes(3072))


def write_fashion_mnist(folder: Path, label: int) -> None:
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        images, labels = struct.pack(">HBB3I", 0, 8, 3, 1, 2, 2) + bytes(4), struct.pack(">HBBI", 0, 8, 1, 1)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels + bytes([label]))


def test_the_names() -> None:
    assert list(SOURCES) == ["digits", "fashion-mnist", "cifar10", "cifar100", "tinyimagenet", "diabetes"]


def test_digits_need_no_folder() -> None:
    assert torch.equal(read_source("digits", None).test.inputs, read_digits().test.inputs)


def test_a_folder_that_is_named(tmp_path: Path) -> None:
    write_cifar100(tmp_path / "anywhere")
    assert read_source("cifar100", tmp_path / "anywhere").train.labels.tolist() == [42]


@pytest.mark.parametrize("place", ["cifar100", "cifar100/cifar-100-binary", "cifar-100-binary"])
def test_the_default_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("FEDHM_DATA", str(tmp_path))
    write_cifar100(tmp_path / place)
    assert read_source("cifar100", None).test.labels.tolist() == [99]


def test_without_the_variable_the_folder_data_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDHM_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "cifar-100-binary.tar.gz", "w:gz") as archive:
        for name in ("train.bin", "test.bin"):
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.size = 3074
            archive.addfile(member, io.BytesIO(bytes(3074)))
    assert read_source("cifar100", None).train.labels.tolist() == [0]


def test_fashion_mnist_is_also_looked_for_where_debian_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = SOURCES["fashion-mnist"]
    assert known.files is not None
    assert known.files.installed_in == (Path("/usr/share/datasets/fashion-mnist"),)
    debian = replace(known.files, installed_in=(tmp_path / "debian",))
    monkeypatch.setitem(SOURCES, "fashion-mnist", replace(known, files=debian))
    monkeypatch.setenv("FEDHM_DATA", str(tmp_path / "mine"))
    write_fashion_mnist(tmp_path / "debian", label=1)
    assert read_source("fashion-mnist", None).train.labels.tolist() == [1]
    write_fashion_mnist(tmp_path / "mine" / "fashion-mnist", label=2)
    assert read_source("fashion-mnist", None).train.labels.tolist() == [2]


@pytest.mark.parametrize(("name", "how_to_get"), MISSING.items())
@pytest.mark.parametrize("exists", [False, True])
def test_missing_data_says_where_it_was_looked_for_and_how_to_get_it(
    tmp_path: Path, name: str, how_to_get: str, exists: bool
) -> None:
    folder = tmp_path / "folder"
    if exists:
        folder.mkdir()
    with pytest.raises(FedhmError) as caught:
        read_source(name, folder)
    sentence = str(caught.value)
    assert sentence.startswith(f"{name} was not found in {folder}: ")
    assert how_to_get in sentence
    assert "data.folder" in sentence
    assert "FEDHM_DATA" in sentence


def test_missing_data_names_all_default_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHM_DATA", str(tmp_path))
    with pytest.raises(FedhmError, match=f"not found in {tmp_path / 'cifar10'} or {tmp_path}: "):
        read_source("cifar10", None)


@pytest.mark.parametrize(("name", "nearest"), [("cifar-10", "cifar10"), ("Fashion_MNIST", "fashion-mnist")])
def test_an_unknown_name_gets_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(FedhmError, match=f"no data source '{name}': did you mean '{nearest}'"):
        read_source(name, None)


def test_a_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(
        FedhmError, match=r"no data source 'zzz': Known are digits, fashion-mnist, .* hf:NAME and text:NAME"
    ):
        read_source("zzz", None)


def test_huggingface_names_go_to_huggingface(tmp_path: Path) -> None:
    with pytest.raises(FedhmError, match="there are no parquet files in"):
        read_source("hf:org/name", tmp_path)


@pytest.mark.slow
def test_importing_the_sources_stays_light() -> None:
    question = "import sys, fedhm.data.sources; print([m for m in ('sklearn', 'datasets') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
