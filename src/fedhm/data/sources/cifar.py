"""CIFAR-10 and CIFAR-100 in the official binary layout, from a folder or straight from the archive.

A file is rows of one or two label bytes and 3 × 32 × 32 pixels, red plane first.
"""

import lzma
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from fedhm.data.samples import Samples, Source
from fedhm.errors import FedhmError

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
MOST = 1 << 30  # bytes of an unpacked archive; the official ones have a sixth of that
MOST_DESCRIPTION = 1 << 20  # bytes of a member that describes another one


@dataclass(frozen=True)
class Layout:
    folder: str
    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int  # the last of them is the label to learn
    classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def files(self) -> tuple[str, ...]:
        return self.train + self.test


CIFAR10 = Layout(
    folder="cifar-10-batches-bin",
    archive="cifar-10-binary.tar.gz",
    train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test=("test_batch.bin",),
    label_bytes=1,
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
CIFAR100 = Layout(
    folder="cifar-100-binary",
    archive="cifar-100-binary.tar.gz",
    train=("train.bin",),
    test=("test.bin",),
    label_bytes=2,
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)


def read_cifar10(place: Path) -> Source:
    """Read CIFAR-10 from `place`: the folder of the `.bin` files, the official `.tar.gz`, or a folder with either."""
    return _read(place, CIFAR10)


def read_cifar100(place: Path) -> Source:
    """Read CIFAR-100 from a `place` as for `read_cifar10`; the labels are the 100 fine ones."""
    return _read(place, CIFAR100)


def holds_cifar10(place: Path) -> bool:
    return _find(place, CIFAR10) is not None


def holds_cifar100(place: Path) -> bool:
    return _find(place, CIFAR100) is not None


def _find(place: Path, layout: Layout) -> Path | None:
    """Return the folder with the `.bin` files, or the archive; a folder wins, as it reads faster."""
    if place.is_file():
        return place
    for folder in (place, place / layout.folder):
        if any((folder / name).is_file() for name in layout.files):
            return folder
    archive = place / layout.archive
    return archive if archive.is_file() else None


def _read(place: Path, layout: Layout) -> Source:
    found = _find(place, layout)
    if found is None:
        raise FedhmError(f"{place} holds neither {layout.archive} nor {layout.folder}/{layout.files[0]}")
    files = dict(_contents(found, layout))
    missing = [name for name in layout.files if name not in files]
    if missing:
        raise FedhmError(f"{found} lacks {', '.join(missing)}; only the binary version of the data is read")
    train, test = (
        _join([_rows(found / name, files.pop(name), layout) for name in names], layout)
        for names in (layout.train, layout.test)
    )
    return Source(train, test, layout.classes, layout.mean, layout.std)


def _contents(found: Path, layout: Layout) -> Iterator[tuple[str, bytes]]:
    try:
        if found.is_dir():
            for name in layout.files:
                if (found / name).is_file():
                    yield name, (found / name).read_bytes()
            return
        with tarfile.open(found, tarinfo=_Member) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if member.offset_data + member.size > MOST:
                    raise FedhmError(f"{found} is not the official archive: it unpacks to more than {MOST >> 20} MB")
                if member.isfile() and name in layout.files and (file := archive.extractfile(member)):
                    yield name, file.read()
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, tarfile.TarError) as error:
        reason = " ".join(str(error).split())  # tarfile tells of each compression, in a line of its own
        raise FedhmError(f"{found} cannot be read: {reason}") from error


class _Member(tarfile.TarInfo):
    """A member of an archive. One that describes the next, with a long name or such, is read whole: must be small."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if not self.isreg() and self.size > MOST_DESCRIPTION:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        found: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return found


def _rows(path: Path, content: bytes, layout: Layout) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    row = layout.label_bytes + PIXELS
    if not content or len(content) % row:
        raise FedhmError(f"{path} is damaged: {len(content)} bytes are not a whole number of {row}-byte rows")
    rows = np.frombuffer(content, np.uint8).reshape(-1, row)
    largest = rows[:, layout.label_bytes - 1].max()
    if largest >= layout.classes:
        raise FedhmError(
            f"{path} holds the label {largest}, but labels go from 0 to {layout.classes - 1}: "
            f"is it a file of {layout.folder}?"
        )
    return rows


def _join(parts: Sequence[np.ndarray[tuple[int, int], np.dtype[np.uint8]]], layout: Layout) -> Samples:
    images = np.concatenate([rows[:, layout.label_bytes :] for rows in parts]).reshape(-1, *SHAPE)
    labels = np.concatenate([rows[:, layout.label_bytes - 1] for rows in parts]).astype(np.int64)
    return Samples(torch.from_numpy(images), torch.from_numpy(labels))
