from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedhm.data.images import holds_tiny_imagenet, read_tiny_imagenet
from fedhm.errors import FedhmError

WNIDS = ["n02", "n01", "n03"]  # the order of the file counts, not that of the names


def save(path: Path, seed: int, mode: str = "RGB", size: tuple[int, int] = (64, 64)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(path, "JPEG")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-imagenet-200"
    folder.mkdir()
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    for number, wnid in enumerate(WNIDS):
        for image in (0, 1, 10):
            path = folder / "train" / wnid / "images" / f"{wnid}_{image}.JPEG"
            save(path, seed=100 * number + image, mode="L" if image == 1 else "RGB")
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
    for image in range(4):
        save(folder / "val" / "images" / f"val_{image}.JPEG", seed=1000 + image)
    lines = [f"val_{image}.JPEG\t{WNIDS[image % 3]}\t0\t32\t44\t62\n" for image in (2, 0, 3, 1)]
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return folder


def decoded(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)


def test_reads_pixels_and_labels_in_a_fixed_order(folder: Path) -> None:
    source = read_tiny_imagenet(folder)
    names = [folder / "train" / w / "images" / f"{w}_{i}.JPEG" for w in WNIDS for i in (0, 1, 10)]
    assert torch.equal(source.train.inputs, torch.stack([decoded(name) for name in names]))
    assert source.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    names = [folder / "val" / "images" / f"val_{image}.JPEG" for image in range(4)]
    assert torch.equal(source.test.inputs, torch.stack([decoded(name) for name in names]))
    assert source.test.labels.tolist() == [0, 1, 2, 0]
    assert source.classes == 3
    assert len(source.mean) == len(source.std) == 3


def test_images_are_contiguous_bytes_and_a_grey_file_has_three_equal_channels(folder: Path) -> None:
    source = read_tiny_imagenet(folder.parent)
    assert source.train.inputs.shape == (9, 3, 64, 64)
    assert source.train.inputs.dtype == source.test.inputs.dtype == torch.uint8
    assert source.train.inputs.is_contiguous()
    assert source.train.labels.dtype == torch.int64
    grey = source.train.inputs[1]
    assert torch.equal(grey[0], grey[1])
    assert torch.equal(grey[0], grey[2])


def test_more_images_than_one_thread_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_tiny_imagenet(folder)
    monkeypatch.setattr("fedhm.data.images.CHUNK", 2)
    assert torch.equal(read_tiny_imagenet(folder).train.inputs, whole.train.inputs)


def test_nothing_there(tmp_path: Path) -> None:
    assert not holds_tiny_imagenet(tmp_path)
    with pytest.raises(FedhmError, match=r"neither wnids\.txt nor tiny-imagenet-200/wnids\.txt"):
        read_tiny_imagenet(tmp_path)


@pytest.mark.parametrize("text", ["", "n01\nn02\nn01\n"])
def test_classes_are_named_once(folder: Path, text: str) -> None:
    (folder / "wnids.txt").write_text(text)
    with pytest.raises(FedhmError, match=r"wnids\.txt must name every class once"):
        read_tiny_imagenet(folder)


def test_wnids_that_are_no_text(folder: Path) -> None:
    (folder / "wnids.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(FedhmError, match=r"wnids\.txt cannot be read"):
        read_tiny_imagenet(folder)


def test_an_image_of_another_size(folder: Path) -> None:
    save(folder / "train" / "n01" / "images" / "n01_5.JPEG", seed=1, size=(64, 32))
    with pytest.raises(FedhmError, match=r"n01_5\.JPEG is 64×32 pixels, not 64×64"):
        read_tiny_imagenet(folder)


@pytest.mark.parametrize("keep", [0, 700])
def test_a_truncated_image(folder: Path, keep: int) -> None:
    path = folder / "val" / "images" / "val_2.JPEG"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(FedhmError, match=r"val_2\.JPEG cannot be decoded"):
        read_tiny_imagenet(folder)


def test_a_class_without_images(folder: Path) -> None:
    for path in (folder / "train" / "n03" / "images").iterdir():
        path.unlink()
    with pytest.raises(FedhmError, match=r"n03.images holds no images"):
        read_tiny_imagenet(folder)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("val_0.JPEG\tn99\t0\t0\t1\t1\n", "gives val_0.JPEG the class 'n99', which wnids.txt does not name"),
        ("val_0.JPEG\n", "gives val_0.JPEG the class ''"),
        ("val_9.JPEG\tn01\t0\t0\t1\t1\n", "names val_9.JPEG, which is not in"),
        ("../../secret.JPEG\tn01\t0\t0\t1\t1\n", "names ../../secret.JPEG, which is not in"),
        ("", "names no images"),
    ],
)
def test_wrong_annotations(folder: Path, text: str, sentence: str) -> None:
    (folder / "val" / "val_annotations.txt").write_text(text)
    with pytest.raises(FedhmError, match=sentence):
        read_tiny_imagenet(folder)


def test_annotations_that_are_missing(folder: Path) -> None:
    (folder / "val" / "val_annotations.txt").unlink()
    with pytest.raises(FedhmError, match=r"val_annotations\.txt cannot be read"):
        read_tiny_imagenet(folder)
