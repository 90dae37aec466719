"""Tiny-ImageNet in its official layout: 200 classes, images of 64×64, the validation part is the test set."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedhm.data.samples import Samples, Source, channel_statistics
from fedhm.errors import FedhmError

FOLDER = "tiny-imagenet-200"
SIDE = 64
CHUNK = 100  # files a task; one at a time, the threads often lose to a plain loop

LabelledFile = tuple[Path, int]


def read_tiny_imagenet(place: Path) -> Source:
    """Read the folder `tiny-imagenet-200`, which is `place` or lies in it. A class number is a line of `wnids.txt`."""
    folder = _find(place)
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
    return _find(place) is not None


def _find(place: Path) -> Path | None:
    return next((f for f in (place, place / FOLDER) if (f / "wnids.txt").is_file()), None)


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise FedhmError(f"{path} cannot be read: {error}") from error


def _images(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.JPEG"))  # a file system promises no order
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

    with ThreadPoolExecutor() as pool:  # one thread decodes while others wait for the disk
        for _ in pool.map(decode, range(0, len(files), CHUNK)):
            pass
    return Samples(images, torch.tensor([number for _, number in files]))


def _pixels(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Decode one image as (3, 64, 64); some of the official files are greyscale."""
    try:
        with Image.open(path) as image:
            if image.size != (SIDE, SIDE):
                width, height = image.size
                raise FedhmError(f"{path} is {width}×{height} pixels, not {SIDE}×{SIDE}")
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise FedhmError(f"{path} cannot be decoded: {error}") from error
