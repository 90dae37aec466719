import gzip
import struct
from pathlib import Path

import pytest
import torch

from fedhm.data.images import holds_idx_files, read_fashion_mnist
from fedhm.errors import FedhmError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
IMAGES = {"train": bytes(range(24)), "t10k": bytes(range(100, 112))}  # of 2×3 pixels
LABELS = {"train": bytes([3, 0, 9, 1]), "t10k": bytes([9, 2])}


def idx(shape: tuple[int, ...], values: bytes, type_code: int = 8, zeros: int = 0) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", zeros, type_code, len(shape), *shape) + values


def write_all(folder: Path) -> None:
    for part in ("train", "t10k"):
        images, labels = IMAGES[part], LABELS[part]
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx((len(labels), 2, 3), images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx((len(labels),), labels))


def compress(path: Path) -> Path:
    zipped = path.with_name(path.name + ".gz")
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return zipped


@pytest.mark.parametrize("zipped", [(), ("train-images", "t10k-labels"), ("train", "t10k")])
def test_reads_back_what_was_written_plain_or_zipped(tmp_path: Path, zipped: tuple[str, ...]) -> None:
    write_all(tmp_path)
    for path in list(tmp_path.iterdir()):
        if path.name.startswith(zipped):
            compress(path)
    source = read_fashion_mnist(tmp_path)
    assert source.classes == 10
    for part, samples in (("train", source.train), ("t10k", source.test)):
        assert samples.inputs.shape == (len(LABELS[part]), 1, 2, 3)
        assert samples.inputs.dtype == torch.uint8
        assert samples.inputs.is_contiguous()
        assert samples.inputs.numpy().tobytes() == IMAGES[part]
        assert samples.labels.dtype == torch.int64
        assert samples.labels.tolist() == list(LABELS[part])
    assert source.mean == pytest.approx([11.5 / 255])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("train-images-idx3-ubyte", b"", "is not an IDX file: 0 bytes are too few for a header"),
        ("train-images-idx3-ubyte", b"PK" + bytes(40), "must begin with two zero bytes"),
        ("train-images-idx3-ubyte", idx((4, 2, 3), IMAGES["train"], type_code=13), "type 0x0d"),
        ("train-images-idx3-ubyte", idx((4,), bytes(30)), "of 1 dimensions where 3 are needed"),
        ("t10k-labels-idx1-ubyte", idx((2, 2, 3), bytes(12)), "of 3 dimensions where 1 are needed"),
        ("train-images-idx3-ubyte", idx((0, 2, 3), b""), r"no values: its dimensions are \(0, 2, 3\)"),
        ("train-images-idx3-ubyte", idx((4, 2, 3), bytes(23)), "truncated: .* 24 bytes but 23 follow"),
        ("train-images-idx3-ubyte", idx((4, 2, 3), bytes(25)), "too long: .* 24 bytes but 25 follow"),
        ("train-images-idx3-ubyte", idx((2**32 - 1,) * 3, bytes(8)), "truncated"),
        ("train-labels-idx1-ubyte", idx((3,), bytes(3)), "holds 4 images but .* holds 3 labels"),
        (
            "train-labels-idx1-ubyte",
            idx((4,), bytes([1, 10, 2, 3])),
            "the label 10, but labels go from 0 to 9",
        ),
        ("t10k-images-idx3-ubyte", idx((2, 3, 3), bytes(18)), "images of 2×3 but test images of 3×3 pixels"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    write_all(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FedhmError, match=sentence) as caught:
        read_fashion_mnist(tmp_path)
    assert (name if "3×3" not in sentence else str(tmp_path)) in str(caught.value)


@pytest.mark.parametrize("damage", [lambda b: b[:-12], lambda b: b"x" + b[1:], lambda b: b[:10] + b"\xff" * 20])
def test_a_damaged_gzip_file_is_named(tmp_path: Path, damage) -> None:
    write_all(tmp_path)
    zipped = compress(tmp_path / "train-images-idx3-ubyte")
    zipped.write_bytes(damage(zipped.read_bytes()))
    with pytest.raises(FedhmError, match=r"train-images-idx3-ubyte\.gz cannot be read"):
        read_fashion_mnist(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert not holds_idx_files(tmp_path)
    write_all(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    assert holds_idx_files(tmp_path)
    with pytest.raises(FedhmError, match=r"neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte\.gz"):
        read_fashion_mnist(tmp_path)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_the_real_fashion_mnist() -> None:
    source = read_fashion_mnist(DEBIAN)
    assert source.train.inputs.shape == (60_000, 1, 28, 28)
    assert source.test.inputs.shape == (10_000, 1, 28, 28)
    assert torch.bincount(source.train.labels).tolist() == [6000] * 10
    assert torch.bincount(source.test.labels).tolist() == [1000] * 10
    # the mean and deviation that are published for this set
    assert source.mean == pytest.approx([0.2860], abs=1e-4)
    assert source.std == pytest.approx([0.3530], abs=1e-4)


def test_a_file_that_unpacks_to_more_than_any_of_them_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path)
    compress(tmp_path / "train-images-idx3-ubyte")
    read_fashion_mnist(tmp_path)
    monkeypatch.setattr("fedhm.data.images.LARGEST_IDX_FILE", 30)  # of 40 bytes; the real limit takes seconds to unpack
    with pytest.raises(FedhmError, match="is not one of the official files: it has more than"):
        read_fashion_mnist(tmp_path)
