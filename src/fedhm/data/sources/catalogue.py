"""The data sets known by name, and where on disk each is looked for."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from fedhm.data.samples import Source
from fedhm.data.sources.cifar import holds_cifar10, holds_cifar100, read_cifar10, read_cifar100
from fedhm.data.sources.diabetes import read_diabetes
from fedhm.data.sources.digits import read_digits
from fedhm.data.sources.huggingface import read_huggingface
from fedhm.data.sources.idx import holds_idx_files, read_fashion_mnist
from fedhm.data.sources.tinyimagenet import holds_tiny_imagenet, read_tiny_imagenet
from fedhm.errors import FedhmError

HUGGINGFACE = "hf:"
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

SOURCES: dict[str, Callable[[Path], Source]] = {
    "digits": lambda _: read_digits(),
    "fashion-mnist": read_fashion_mnist,
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "tinyimagenet": read_tiny_imagenet,
    "diabetes": lambda _: read_diabetes(),
}

# the shape of an input and the number of outputs, so that costs can be told without the data
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "diabetes": ((10,), 1),
    "digits": ((1, 8, 8), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "tinyimagenet": ((3, 64, 64), 200),
}

# what the labels stand for, where a data set's files do not say
CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "fashion-mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}  # fmt: skip


@dataclass(frozen=True)
class Files:
    """Where the files of a source on disk may lie, and how to get them."""

    are_in: Callable[[Path], bool]
    how_to_get: str
    may_lie_beside_others: bool = True  # directly in FEDHM_DATA, next to other data sets
    installed_in: tuple[Path, ...] = ()


FILES = {
    "fashion-mnist": Files(
        holds_idx_files,
        "install Debian's package dataset-fashion-mnist, or download the four *-ubyte.gz files "
        "from Zalando Research's repository fashion-mnist",
        may_lie_beside_others=False,  # MNIST's files have the same names
        installed_in=(DEBIAN_FASHION_MNIST,),
    ),
    "cifar10": Files(holds_cifar10, "download cifar-10-binary.tar.gz from the CIFAR page of the University of Toronto"),
    "cifar100": Files(
        holds_cifar100, "download cifar-100-binary.tar.gz from the CIFAR page of the University of Toronto"
    ),
    "tinyimagenet": Files(
        holds_tiny_imagenet, "download tiny-imagenet-200.zip from Stanford's course CS231n and unpack it"
    ),
}


def read_source(name: str, folder: Path | None) -> Source:
    """Read the data set `name`, or `hf:NAME` from Hugging Face, from `folder` or from its default places."""
    if name.startswith(HUGGINGFACE):
        return read_huggingface(name.removeprefix(HUGGINGFACE), folder)
    if name not in SOURCES:
        nearest = get_close_matches(name.lower(), SOURCES, n=1)
        guess = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise FedhmError(
            f"there is no data source {name!r}: {guess}Known are {', '.join(SOURCES)}, hf:NAME and text:NAME."
        )
    return SOURCES[name](_place(name, folder))


def lies_in(name: str, folder: Path | None) -> bool:
    """Say whether `folder` holds the files of the data set `name`; False for Hugging Face's, which cannot be told."""
    return name in FILES and folder is not None and FILES[name].are_in(folder)


def _place(name: str, folder: Path | None) -> Path:
    if name not in FILES:
        return Path()  # comes with a package, its reader looks at no folder
    files = FILES[name]
    places = [folder] if folder is not None else _default_places(name, files)
    for place in places:
        if files.are_in(place):
            return place
    raise FedhmError(
        f"{name} was not found in {' or '.join(str(place) for place in places)}: {files.how_to_get}. "
        "The setting data.folder, or the environment variable FEDHM_DATA, names the place."
    )


def _default_places(name: str, files: Files) -> list[Path]:
    root = Path(os.environ.get("FEDHM_DATA", "data"))
    beside_others = [root] if files.may_lie_beside_others else []
    return [root / name, *beside_others, *files.installed_in]
