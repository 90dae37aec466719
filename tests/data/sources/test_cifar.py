import bz2
import gzip
import io
import lzma
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedhm.config.schema import DataConfig
from fedhm.data.federation import Federation, load_federation
from fedhm.data.images import CIFAR10, CIFAR100, Layout, holds_cifar10, read_cifar10, read_cifar100
from fedhm.data.samples import Feed, Samples, Source
from fedhm.errors import FedhmError

LAYOUTS = [
    pytest.param(CIFAR10, read_cifar10, id="cifar10"),
    pytest.param(CIFAR100, read_cifar100, id="cifar100"),
]
ROWS = 3
Reader = Callable[[Path], Source]


def contents(layout: Layout) -> dict[str, bytes]:
    """Rows of random pixels; the last label byte is the one to learn, a first of two must be ignored."""
    chance = random.Random(layout.classes)
    files = {}
    for name in layout.files:
        rows = [
            bytes([200] * (layout.label_bytes - 1) + [chance.randrange(layout.classes)]) + chance.randbytes(3072)
            for _ in range(ROWS)
        ]
        files[name] = b"".join(rows)
    return files


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_archive(path: Path, folder: str, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in {"batches.meta.txt": b"airplane\n", "readme.html": b"", **files}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def assert_holds(samples: Samples, layout: Layout, content: bytes) -> None:
    width = layout.label_bytes + 3072
    rows = [content[start : start + width] for start in range(0, len(content), width)]
    assert samples.inputs.shape == (len(rows), 3, 32, 32)
    assert samples.inputs.dtype == torch.uint8
    assert samples.inputs.is_contiguous()
    assert samples.labels.dtype == torch.int64
    assert samples.labels.tolist() == [row[layout.label_bytes - 1] for row in rows]
    assert samples.inputs.numpy().tobytes() == b"".join(row[layout.label_bytes :] for row in rows)


@pytest.mark.parametrize(("layout", "read"), LAYOUTS)
@pytest.mark.parametrize("place", ["folder", "parent", "archive", "folder of the archive"])
def test_reads_back_what_was_written(tmp_path: Path, layout: Layout, read: Reader, place: str) -> None:
    files = contents(layout)
    if "archive" in place:
        write_archive(tmp_path / layout.archive, layout.folder, files)
    else:
        write_folder(tmp_path / layout.folder, files)
    before = sorted(tmp_path.rglob("*"))
    path = {"folder": tmp_path / layout.folder, "archive": tmp_path / layout.archive}.get(place, tmp_path)
    source = read(path)
    assert_holds(source.train, layout, b"".join(files[name] for name in layout.train))
    assert_holds(source.test, layout, b"".join(files[name] for name in layout.test))
    assert (source.classes, source.mean, source.std) == (layout.classes, layout.mean, layout.std)
    assert sorted(tmp_path.rglob("*")) == before  # nothing was unpacked


def test_a_file_in_the_order_of_the_archive_does_not_change_the_order_of_the_samples(tmp_path: Path) -> None:
    files = contents(CIFAR10)
    write_archive(tmp_path / "any name.tgz", "elsewhere", dict(reversed(files.items())))
    source = read_cifar10(tmp_path / "any name.tgz")
    assert_holds(source.train, CIFAR10, b"".join(files[name] for name in CIFAR10.train))


def test_nothing_there(tmp_path: Path) -> None:
    assert not holds_cifar10(tmp_path)
    with pytest.raises(FedhmError, match=r"holds neither cifar-10-binary\.tar\.gz nor cifar-10-batches-bin/data"):
        read_cifar10(tmp_path)
    with pytest.raises(FedhmError, match=r"holds neither cifar-100-binary\.tar\.gz nor cifar-100-binary/train"):
        read_cifar100(tmp_path)


@pytest.mark.parametrize("archived", [False, True])
def test_missing_files_are_named(tmp_path: Path, archived: bool) -> None:
    files = contents(CIFAR10)
    del files["data_batch_3.bin"], files["test_batch.bin"]
    if archived:
        write_archive(tmp_path / CIFAR10.archive, CIFAR10.folder, files)
    else:
        write_folder(tmp_path / CIFAR10.folder, files)
    with pytest.raises(FedhmError, match=r"lacks data_batch_3\.bin, test_batch\.bin; only the binary version"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize("length", [0, 3072, 2 * 3073 - 1])
def test_a_file_of_broken_rows_is_named(tmp_path: Path, length: int) -> None:
    write_folder(tmp_path / "bin", contents(CIFAR10) | {"data_batch_2.bin": bytes(length)})
    with pytest.raises(FedhmError, match=rf"data_batch_2\.bin is damaged: {length} bytes .* 3073-byte rows"):
        read_cifar10(tmp_path / "bin")


def test_a_label_out_of_range_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "ten", contents(CIFAR10) | {"test_batch.bin": bytes([10]) + bytes(3072)})
    with pytest.raises(FedhmError, match=r"test_batch\.bin holds the label 10, but labels go from 0 to 9"):
        read_cifar10(tmp_path / "ten")
    write_folder(tmp_path / "hundred", contents(CIFAR100) | {"train.bin": bytes([0, 100]) + bytes(3072)})
    with pytest.raises(FedhmError, match=r"train\.bin holds the label 100, but labels go from 0 to 99"):
        read_cifar100(tmp_path / "hundred")


@pytest.mark.parametrize("damage", ["not an archive", "truncated", "flipped"])
def test_a_damaged_archive_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / CIFAR10.archive
    write_archive(path, CIFAR10.folder, contents(CIFAR10))
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(
        {
            "not an archive": b"<html>not found</html>",
            "truncated": whole[:middle],
            "flipped": whole[:middle] + b"\xff" * 5000 + whole[middle + 5000 :],
        }[damage]
    )
    with pytest.raises(FedhmError, match=r"cifar-10-binary\.tar\.gz (cannot be read|lacks)"):
        read_cifar10(tmp_path)


def member(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


NOISE = member("data_batch_1.bin", 1 << 16) + random.Random(0).randbytes(1 << 16)
XZ, BZ2 = lzma.compress(NOISE), bz2.compress(NOISE)
BOMB = gzip.compress(member("data_batch_1.bin", 1 << 34) + bytes(1 << 16))
PAX_BOMB = gzip.compress(member("x", 1 << 34, tarfile.XHDTYPE) + bytes(1 << 16))
ODD_PAX = member("x", 20, tarfile.XHDTYPE) + b"x" * 20 + bytes(492) + bytes(1024)
ODD_SIZE = member("x", 16, tarfile.XHDTYPE) + b"16 size=many\xff\xff\xff\n" + bytes(496) + member("y", 0) + bytes(1024)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(XZ[:40_000] + b"????" + XZ[40_004:], "cannot be read", id="damaged xz"),
        pytest.param(XZ[:40_000], "cannot be read", id="truncated xz"),
        pytest.param(BZ2[:40_000], "cannot be read", id="truncated bz2"),
        pytest.param(BOMB, "is not the official archive: it unpacks to more than 1024 MB", id="a file too large"),
        pytest.param(PAX_BOMB, "cannot be read: .*a header of 17179869184 bytes", id="a header too large"),
        pytest.param(ODD_PAX, "cannot be read|lacks", id="a header that is none"),
        pytest.param(ODD_SIZE, "cannot be read|lacks", id="a header with an odd size"),
    ],
)
def test_damaged_and_hostile_archives_are_one_sentence(content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / CIFAR10.archive).write_bytes(content)
    with pytest.raises(FedhmError, match=sentence) as error:
        read_cifar10(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("source", "layout"), [("cifar10", CIFAR10), ("cifar100", CIFAR100)])
@pytest.mark.parametrize("downscale", [1, 2])
def test_images_are_normalised_by_the_published_numbers_on_request(
    source: str, layout: Layout, downscale: int, tmp_path: Path
) -> None:
    write_folder(tmp_path / layout.folder, contents(layout))

    def read(normalisation: str) -> Federation:
        settings = {"source": source, "folder": tmp_path, "normalisation": normalisation, "downscale": downscale}
        return load_federation(DataConfig.model_validate(settings), clients=2, seed=0)

    measured, published = read("measured"), read("published")
    assert published.preprocessing.mean == pytest.approx(layout.mean, abs=5e-4)  # rounded in another way
    expected = {"cifar10": (0.2023, 0.1994, 0.2010), "cifar100": (0.2675, 0.2565, 0.2761)}[source]
    assert published.preprocessing.std == expected
    assert measured.preprocessing != published.preprocessing
    assert torch.equal(measured.clients[0].tensor, published.clients[0].tensor)
    inputs, _ = Feed(published.clients[0], published.preprocessing).one()
    pixels = published.clients[0].tensor[: len(inputs)].float() / 255
    mean, std = (
        torch.tensor(values)[:, None, None] for values in (published.preprocessing.mean, published.preprocessing.std)
    )
    torch.testing.assert_close(inputs, (pixels - mean) / std)


def test_a_data_set_without_published_numbers_is_refused_before_it_is_read() -> None:
    config = DataConfig(source="fashion-mnist", normalisation="published")
    with pytest.raises(
        FedhmError, match=r"for data sets of .*, cifar10, cifar100, tinyimagenet: set 'measured' for fashi"
    ):
        load_federation(config, clients=2, seed=0)
