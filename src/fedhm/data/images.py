"""Image data sets: digits, Fashion-MNIST, CIFAR-10 and -100, Tiny-ImageNet; and downscaling of images."""

import gzip
import lzma
import struct
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedhm.data.samples import Samples, Source, channel_statistics
from fedhm.errors import FedhmError

DIGITS_CLASSES = 10
DIGITS_FILE = Path("datasets", "data", "digits.csv.gz")  # in scikit-learn
TEST_EVERY = 5


def read_digits() -> Source:
    """Read the 1,797 handwritten digits of 8×8 pixels in scikit-learn.

    Every fifth of each class is for testing, whatever the seed, so that metrics are comparable.
    """
    pixels, targets = _read_digits_file()
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = targets.astype(np.int64)

    for_testing = np.zeros(len(labels), dtype=bool)
    for label in range(DIGITS_CLASSES):
        for_testing[np.flatnonzero(labels == label)[TEST_EVERY - 1 :: TEST_EVERY]] = True
    train, test = (
        Samples(torch.from_numpy(images[chosen]), torch.from_numpy(labels[chosen]))
        for chosen in (~for_testing, for_testing)
    )
    mean, std = channel_statistics(train.tensor)
    return Source(train, test, DIGITS_CLASSES, mean, std)


def _read_digits_file() -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
    """Return pixels (N, 64) and labels, from the file inside scikit-learn.

    Importing scikit-learn takes longer than a round of the demo, and on Flower each task has its own process.
    """
    package = find_spec("sklearn")
    places = (package.submodule_search_locations if package else None) or []
    for place in places:
        if (Path(place) / DIGITS_FILE).exists():
            table = np.loadtxt(Path(place) / DIGITS_FILE, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits  # another version may keep the file elsewhere

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


IDX_CLASSES = 10
UNSIGNED_BYTE = 0x08
LARGEST_IDX_FILE = 1 << 28  # bytes, unpacked: five times the largest official file
PARTS = ("train", "t10k")


def read_fashion_mnist(folder: Path) -> Source:
    """Read Fashion-MNIST, or MNIST, from its four IDX files in `folder`, plain or `.gz`.

    They are `images-idx3-ubyte` and `labels-idx1-ubyte` with the prefixes `train-` and `t10k-`.
    """
    train, test = (_read_part(folder, part) for part in PARTS)
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise FedhmError(f"{folder} holds training images of {_size(train)} but test images of {_size(test)} pixels")
    mean, std = channel_statistics(train.tensor)
    return Source(train, test, IDX_CLASSES, mean, std)


def holds_idx_files(folder: Path) -> bool:
    """Tell whether any of the four files is there; if some are missing, reading names them."""
    return any(_existing(folder / name) for part in PARTS for name in idx_names(part))


def idx_names(part: str) -> tuple[str, str]:
    return f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"


def _size(samples: Samples) -> str:
    return "×".join(str(side) for side in samples.inputs.shape[2:])


def _existing(path: Path) -> Path | None:
    zipped = path.with_name(path.name + ".gz")
    return next((p for p in (path, zipped) if p.is_file()), None)


def _read_part(folder: Path, part: str) -> Samples:
    paths = []
    for name in idx_names(part):
        path = _existing(folder / name)
        if path is None:
            raise FedhmError(f"{folder} holds neither {name} nor {name}.gz")
        paths.append(path)
    images, labels = _read_idx(paths[0], dimensions=3), _read_idx(paths[1], dimensions=1)
    if len(images) != len(labels):
        raise FedhmError(f"{paths[0]} holds {len(images)} images but {paths[1]} holds {len(labels)} labels")
    if labels.max() >= IDX_CLASSES:
        raise FedhmError(f"{paths[1]} holds the label {labels.max()}, but labels go from 0 to {IDX_CLASSES - 1}")
    return Samples(images.unsqueeze(1), labels.long())


def _read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an IDX file: two zero bytes, type code, number of dimensions, big-endian uint32 dimensions, values."""
    content = _content(path)
    header = struct.Struct(f">HBB{dimensions}I")
    if len(content) < header.size:
        raise FedhmError(f"{path} is not an IDX file: {len(content)} bytes are too few for a header")
    zeros, type_code, found, *shape = header.unpack_from(content)
    if zeros != 0:
        raise FedhmError(f"{path} is not an IDX file: it must begin with two zero bytes")
    if type_code != UNSIGNED_BYTE:
        raise FedhmError(f"{path} holds values of type 0x{type_code:02x}, not unsigned bytes (0x08)")
    if found != dimensions:
        raise FedhmError(f"{path} holds an array of {found} dimensions where {dimensions} are needed")
    if prod(shape) == 0:
        raise FedhmError(f"{path} holds no values: its dimensions are {tuple(shape)}")
    length = len(content) - header.size
    if length != prod(shape):
        raise FedhmError(
            f"{path} is {'truncated' if length < prod(shape) else 'too long'}: "
            f"its header announces {prod(shape)} bytes but {length} follow"
        )
    # a copy, since torch wants writable memory
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header.size).reshape(shape).copy())


def _content(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(LARGEST_IDX_FILE + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FedhmError(f"{path} cannot be read: {error}") from error
    if len(content) > LARGEST_IDX_FILE:
        raise FedhmError(f"{path} is not one of the official files: it has more than {LARGEST_IDX_FILE >> 20} MB")
    return content


SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
LARGEST_CIFAR_FILE = 1 << 30  # bytes, unpacked: six times the official archives
MOST_DESCRIPTION = 1 << 20  # bytes of an archive member that describes another one


@dataclass(frozen=True)
class Layout:
    """The official binary layout of CIFAR: files of rows, each of one or two label bytes and 3 × 32 × 32 pixels."""

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
    return _read_cifar(place, CIFAR10)


def read_cifar100(place: Path) -> Source:
    """Read CIFAR-100 from a `place` as for `read_cifar10`; the labels are the 100 fine ones."""
    return _read_cifar(place, CIFAR100)


def holds_cifar10(place: Path) -> bool:
    return _find_cifar(place, CIFAR10) is not None


def holds_cifar100(place: Path) -> bool:
    return _find_cifar(place, CIFAR100) is not None


def _find_cifar(place: Path, layout: Layout) -> Path | None:
    """Return the folder with the `.bin` files, or the archive; a folder is preferred, since it reads faster."""
    if place.is_file():
        return place
    for folder in (place, place / layout.folder):
        if any((folder / name).is_file() for name in layout.files):
            return folder
    archive = place / layout.archive
    return archive if archive.is_file() else None


def _read_cifar(place: Path, layout: Layout) -> Source:
    found = _find_cifar(place, layout)
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
                if member.offset_data + member.size > LARGEST_CIFAR_FILE:
                    raise FedhmError(
                        f"{found} is not the official archive: it unpacks to more than {LARGEST_CIFAR_FILE >> 20} MB"
                    )
                if member.isfile() and name in layout.files and (file := archive.extractfile(member)):
                    yield name, file.read()
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, tarfile.TarError) as error:
        reason = " ".join(str(error).split())  # tarfile lists every compression in a line of its own
        raise FedhmError(f"{found} cannot be read: {reason}") from error


class _Member(tarfile.TarInfo):
    """A member of an archive. One that describes the next, such as a long name, is read whole, so it must be small."""

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


FOLDER = "tiny-imagenet-200"
SIDE = 64
CHUNK = 100  # files of a thread's task; with single files, threads are often slower than a plain loop

LabelledFile = tuple[Path, int]


def read_tiny_imagenet(place: Path) -> Source:
    """Read Tiny-ImageNet, 200 classes of 64×64 pixels, from the folder `tiny-imagenet-200`, which is `place` or in it.

    A class number is a line of `wnids.txt`. The validation part is the test set.
    """
    folder = _find_tiny_imagenet(place)
    if folder is None:
        raise FedhmError(f"{place} holds neither wnids.txt nor {FOLDER}/wnids.txt")
    wnids = _lines(folder / "wnids.txt")
    class_of = {wnid: number for number, wnid in enumerate(wnids)}
    if not wnids or len(class_of) != len(wnids):
        raise FedhmError(f"{folder / 'wnids.txt'} must name every class once")

    train = _decode(_training_files(folder / "train", class_of))
    test = _decode(_validation_files(folder / "val", class_of))
    mean, std = channel_statistics(train.tensor)
    return Source(train, test, len(wnids), mean, std)


def holds_tiny_imagenet(place: Path) -> bool:
    return _find_tiny_imagenet(place) is not None


def _find_tiny_imagenet(place: Path) -> Path | None:
    return next((f for f in (place, place / FOLDER) if (f / "wnids.txt").is_file()), None)


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise FedhmError(f"{path} cannot be read: {error}") from error


def _images(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.JPEG"))  # file systems promise no order
    if not files:
        raise FedhmError(f"{folder} holds no images (*.JPEG)")
    return files


def _training_files(folder: Path, class_of: dict[str, int]) -> list[LabelledFile]:
    return [(path, number) for wnid, number in class_of.items() for path in _images(folder / wnid / "images")]


def _validation_files(folder: Path, class_of: dict[str, int]) -> list[LabelledFile]:
    annotations = folder / "val_annotations.txt"
    paths = {path.name: path for path in _images(folder / "images")}
    files: dict[str, LabelledFile] = {}
    for line in _lines(annotations):
        name, wnid, *_ = [*line.split("\t"), ""]
        if wnid not in class_of:
            raise FedhmError(f"{annotations} gives {name} the class {wnid!r}, which wnids.txt does not name")
        if name not in paths:
            raise FedhmError(f"{annotations} names {name}, which is not in {folder / 'images'}")
        files[name] = paths[name], class_of[wnid]
    if not files:
        raise FedhmError(f"{annotations} names no images")
    return [files[name] for name in sorted(files)]


def _decode(files: Sequence[LabelledFile]) -> Samples:
    images = torch.empty(len(files), 3, SIDE, SIDE, dtype=torch.uint8)
    pixels = images.numpy()

    def decode(start: int) -> None:
        for position, (path, _) in enumerate(files[start : start + CHUNK], start):
            pixels[position] = _pixels(path)

    with ThreadPoolExecutor() as pool:  # some threads decode while others wait for the disk
        for _ in pool.map(decode, range(0, len(files), CHUNK)):
            pass
    return Samples(images, torch.tensor([number for _, number in files]))


def _pixels(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Decode one image to (3, 64, 64); some of the official files are greyscale."""
    try:
        with Image.open(path) as image:
            if image.size != (SIDE, SIDE):
                width, height = image.size
                raise FedhmError(f"{path} is {width}×{height} pixels, not {SIDE}×{SIDE}")
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise FedhmError(f"{path} cannot be decoded: {error}") from error


def downscale_source(source: Source, factor: int) -> Source:
    """Return the data set with images of 1/`factor` of their height and width.

    Means of pixels vary less than pixels, so mean and deviation are computed again.
    """
    if factor == 1:
        return source
    train, test = downscale(source.train, factor), downscale(source.test, factor)
    mean, std = channel_statistics(train.tensor)
    return replace(source, train=train, test=test, mean=mean, std=std)


def downscale(samples: Samples, factor: int) -> Samples:
    """Return images (N, C, H, W) as (N, C, H/k, W/k), each pixel the rounded mean of a block, a half rounded up."""
    if factor == 1:
        return samples
    count, *shape = samples.inputs.shape
    smaller = downscale_shape(tuple(shape), factor)
    if not samples.are_images:
        raise FedhmError(f"data.downscale = {factor} is for images in whole numbers, not for {samples.inputs.dtype}")
    # pixel by pixel of the blocks, so that no copy of the data set in larger numbers is made
    sums = torch.full((count, *smaller), factor**2 // 2, dtype=torch.int32)
    for row in range(factor):
        for column in range(factor):
            sums += samples.tensor[:, :, row::factor, column::factor]
    return Samples(sums.div_(factor**2, rounding_mode="floor").to(torch.uint8), samples.labels)


def downscale_shape(shape: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """Return the shape of inputs after downscaling."""
    if factor == 1:
        return shape
    if len(shape) != 3:
        raise FedhmError(f"data.downscale = {factor} is for images, and inputs of shape {shape} are none")
    channels, height, width = shape
    if height % factor or width % factor:
        raise FedhmError(f"data.downscale = {factor} does not divide images of {height}×{width} pixels")
    return channels, height // factor, width // factor
