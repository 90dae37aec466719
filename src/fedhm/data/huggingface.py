"""Image classification data sets of Hugging Face, from the hub or from parquet files in a folder."""

import io
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fedhm.data.samples import Samples, Source, channel_statistics
from fedhm.errors import FedhmError
from fedhm.machine.extras import how_to_install

if TYPE_CHECKING:
    import datasets

LABEL_NAMES = ("label", "labels", "fine_label", "target")
IMAGE_NAMES = ("image", "img")
TRAIN = ("train",)
TEST = ("test", "validation", "valid", "val")  # the first that is there
GREY_MODES = ("1", "L", "LA")

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def read_huggingface(name: str, folder: Path | None = None) -> Source:
    """Read a data set of Hugging Face: `mnist`, `org/name`, or `org/name@config` for one configuration of several.

    With `folder` nothing is downloaded. Its parquet files are read, or those in `folder/data`; with `@config` those in
    `folder/config`. The name of a file says whether it is for training or for testing.
    """
    with load_splits(name, folder) as splits:
        return convert(name, splits)


@contextmanager
def load_splits(name: str, folder: Path | None, advice: str = "", **options: Any) -> "Iterator[datasets.DatasetDict]":
    """Yield the splits of a data set, named as for `read_huggingface`; `options` are further ones of `datasets`.

    advice  the end of the error if the hub does not give it
    """
    path, _, config = name.partition("@")
    if not path:
        raise FedhmError("hf: must be followed by the name of a data set, as in hf:mnist or hf:org/name@config")

    if folder is not None:
        files = _parquet_files(folder, config)
        with tempfile.TemporaryDirectory() as cache:  # the data is read whole, so the cache can go
            yield _load(
                name, f"Check the parquet files in {folder}.", "parquet", data_files=files, cache_dir=cache, **options
            )
        return
    advice = advice or "Check the name and the network, or let data.folder name a folder with its parquet files."
    # some versions of `datasets` would run a script of the hub
    yield _load(name, advice, path, config or None, trust_remote_code=False, **options)


def _load(name: str, advice: str, *arguments: str | None, **options: Any) -> "datasets.DatasetDict":
    try:
        import datasets
    except ImportError as error:
        raise FedhmError(f"reading hf:{name} needs the package datasets: {how_to_install('hf')}") from error
    try:
        return datasets.load_dataset(*arguments, **options)
    except Exception as error:  # errors of arrow, the hub and the network have no common class
        wrapped = isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__
        reason = str(wrapped or error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise FedhmError(f"hf:{name} cannot be loaded: {reason}. {advice}") from error


def _parquet_files(folder: Path, config: str) -> dict[str, list[str]]:
    places = [folder / config] if config else [folder, folder / "data"]
    files = next((found for place in places if (found := sorted(place.glob("*.parquet")))), [])
    if not files:
        raise FedhmError(f"there are no parquet files in {' or '.join(str(place) for place in places)}")
    train = [file for file in files if "train" in file.name.lower()]
    others = [file for file in files if file not in train]
    test = next((found for word in TEST if (found := [f for f in others if word in f.name.lower()])), [])
    if not train or not test:
        raise FedhmError(
            f"{files[0].parent} must hold parquet files with 'train' in their names, "
            "and others with 'test' or 'validation'"
        )
    return {"train": [str(file) for file in train], "test": [str(file) for file in test]}


def convert(name: str, splits: "datasets.DatasetDict") -> Source:
    """Decode the images of a data set."""
    train, test = (find_split(name, splits, words) for words in (TRAIN, TEST))
    image_column, label_column = _image_column(name, train), _label_column(name, train)
    for column in (image_column, label_column):
        if column not in test.features:
            raise FedhmError(f"hf:{name} has the column {column!r} for training but not for testing")

    train_labels, test_labels, classes = _class_numbers(name, train, test, label_column)
    train_pixels, test_pixels = (_decode(name, split, image_column) for split in (train, test))
    size = train_pixels[0].shape[:2]
    channels = 3 if any(image.ndim == 3 for image in (*train_pixels, *test_pixels)) else 1
    train_images, test_images = (_stack(name, pixels, channels, size) for pixels in (train_pixels, test_pixels))
    mean, std = channel_statistics(train_images)
    return Source(Samples(train_images, train_labels), Samples(test_images, test_labels), classes, mean, std)


def find_split(name: str, splits: "datasets.DatasetDict", words: Sequence[str]) -> "datasets.Dataset":
    """Return the first split that has one of these names; raise if there is none, or if it is empty."""
    found = next((word for word in words if word in splits), None)
    if found is None:
        raise FedhmError(f"hf:{name} has no split called {' or '.join(words)}; it has {', '.join(splits)}")
    if not len(splits[found]):
        raise FedhmError(f"hf:{name} has no samples in its split {found}")
    return splits[found]


def _only(name: str, kind: str, candidates: Sequence[str], usual_names: Sequence[str]) -> str:
    usual = [column for column in candidates if column in usual_names]
    for found in (candidates, usual):
        if len(found) == 1:
            return found[0]
    if candidates:
        raise FedhmError(f"hf:{name} has several columns that could be the {kind}: {', '.join(candidates)}")
    raise FedhmError(f"hf:{name} has no column that could be the {kind}")


def _image_column(name: str, split: "datasets.Dataset") -> str:
    import datasets

    def is_image(feature: Any) -> bool:
        # without the metadata of `datasets`, an image is a struct
        stored = isinstance(feature, dict) and "bytes" in feature and feature.keys() <= {"bytes", "path"}
        return stored or isinstance(feature, datasets.Image)

    candidates = [column for column, feature in split.features.items() if is_image(feature)]
    return _only(name, "image", candidates, IMAGE_NAMES)


def _label_column(name: str, split: "datasets.Dataset") -> str:
    import datasets

    features = split.features
    of_classes = [column for column, f in features.items() if isinstance(f, datasets.ClassLabel)]
    types = {column: f.dtype for column, f in features.items() if isinstance(f, datasets.Value)}
    integers = [column for column, dtype in types.items() if dtype.lstrip("u").startswith("int")]
    strings = [column for column, dtype in types.items() if dtype in ("string", "large_string")]
    named = [column for column in (*integers, *strings) if column in LABEL_NAMES]
    return _only(name, "label", of_classes or named or integers, LABEL_NAMES)


def _class_numbers(
    name: str, train: "datasets.Dataset", test: "datasets.Dataset", column: str
) -> tuple[Tensor, Tensor, int]:
    import datasets

    known = train.features[column]
    values = range(known.num_classes) if isinstance(known, datasets.ClassLabel) else set(train[column])
    if None in values:
        raise FedhmError(f"hf:{name} has training samples without a {column}")
    class_of = {value: number for number, value in enumerate(sorted(values))}
    both = []
    for split in (train, test):
        labels = list(split[column])
        strange = next((label for label in labels if label not in class_of), None)
        if None in labels or strange is not None:
            raise FedhmError(
                f"hf:{name} has a sample with the {column} {strange!r}, which is not one of the "
                f"{len(class_of)} classes to learn"
            )
        both.append(torch.tensor([class_of[label] for label in labels], dtype=torch.int64))
    return both[0], both[1], len(class_of)


def _decode(name: str, split: "datasets.Dataset", column: str) -> list[Pixels]:
    import datasets

    encoded = split.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    return [_pixels(name, number, row[column]) for number, row in enumerate(encoded)]


def _pixels(name: str, number: int, encoded: dict[str, Any] | None) -> Pixels:
    """Decode an image to (H, W) if it is greyscale, otherwise to (H, W, 3)."""
    if encoded is None or (encoded["bytes"] is None and encoded["path"] is None):
        raise FedhmError(f"hf:{name} has no image in row {number}")
    try:
        file = io.BytesIO(encoded["bytes"]) if encoded["bytes"] is not None else encoded["path"]
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):
                raise FedhmError(f"hf:{name} has an image of more than 8 bits a channel in row {number}")
            upright = ImageOps.exif_transpose(image)
            return np.asarray(upright.convert("L" if image.mode in GREY_MODES else "RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise FedhmError(f"hf:{name} has an image in row {number} that cannot be decoded: {error}") from error


def _stack(name: str, pixels: Sequence[Pixels], channels: int, size: tuple[int, ...]) -> Tensor:
    images = np.empty((len(pixels), channels, *size), np.uint8)
    for number, image in enumerate(pixels):
        if image.shape[:2] != size:
            (height, width), (first_height, first_width) = image.shape[:2], size
            raise FedhmError(
                f"hf:{name} has images of several sizes, {first_width}×{first_height} and "
                f"{width}×{height} pixels; all must be of one size"
            )
        # a grey image among coloured ones fills all three channels
        images[number] = image if image.ndim == 2 else image.transpose(2, 0, 1)
    return torch.from_numpy(images)
