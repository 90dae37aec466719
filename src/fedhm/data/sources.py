"""The data sets that `data.source` names: how each is read, and where on disk it is looked for.

A new data set is a function that returns a `Source`, and a row in `SOURCES`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedhm.data.huggingface import read_huggingface
from fedhm.data.images import (
    holds_cifar10,
    holds_cifar100,
    holds_idx_files,
    holds_tiny_imagenet,
    read_cifar10,
    read_cifar100,
    read_digits,
    read_fashion_mnist,
    read_tiny_imagenet,
)
from fedhm.data.samples import Samples, Source
from fedhm.errors import FedhmError
from fedhm.machine.printable import quoted_command

HUGGINGFACE = "hf:"
TEST_EVERY = 5  # every fifth patient is for testing


def read_diabetes() -> Source:
    """Read the diabetes data of scikit-learn: the progression of the disease in 442 patients, from ten measurements.

    Measurements and progression are scaled to mean 0 and deviation 1 over the training patients. The test patients do
    not depend on the seed, so that metrics are comparable.
    """
    from sklearn.datasets import load_diabetes  # takes a second, which other sources do not need

    inputs, progression = load_diabetes(return_X_y=True, scaled=False)
    table = np.column_stack([inputs, progression])
    for_testing = np.arange(len(table)) % TEST_EVERY == TEST_EVERY - 1
    mean, deviation = table[~for_testing].mean(0), table[~for_testing].std(0)
    scaled = torch.from_numpy((table - mean) / deviation).float()
    train, test = (
        Samples(scaled[chosen, :-1], scaled[chosen, -1])
        for chosen in (torch.from_numpy(~for_testing), torch.from_numpy(for_testing))
    )
    return Source(train, test, 1, (), ())


@dataclass(frozen=True)
class Files:
    """The files of a data set on disk: how to recognize them, and how to get them."""

    are_in: Callable[[Path], bool]
    how_to_get: str
    shares_folder: bool = True  # they may lie directly in FEDHM_DATA, next to other data sets
    installed_in: tuple[Path, ...] = ()


class Normalisation(NamedTuple):
    """The mean and the deviation of each channel, of pixels in 0…1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class NamedSource:
    """A data set known by name."""

    read: Callable[[Path], Source]  # from the folder of its files
    shape: tuple[int, ...] = ()  # of one input; empty: `fedhm sizes` has to read the data
    outputs: int = 0  # classes, or numbers to predict
    files: Files | None = None  # None: the data comes with a package
    class_names: tuple[str, ...] = ()
    published: Normalisation | None = None  # in FedHM's published code, if it uses the data set
    train_samples: int = 0  # in its published files, equally many of each class; 0: only its files tell


_CIFAR_PAGE = "from the CIFAR page of the University of Toronto"

SOURCES: dict[str, NamedSource] = {
    "digits": NamedSource(lambda _: read_digits(), (1, 8, 8), 10),
    "fashion-mnist": NamedSource(
        read_fashion_mnist,
        (1, 28, 28),
        10,
        Files(
            holds_idx_files,
            "install Debian's package dataset-fashion-mnist, or download the four *-ubyte.gz files "
            "from Zalando Research's repository fashion-mnist",
            shares_folder=False,  # MNIST's files have the same names
            installed_in=(Path("/usr/share/datasets/fashion-mnist"),),
        ),
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        train_samples=60_000,
    ),
    "cifar10": NamedSource(
        read_cifar10,
        (3, 32, 32),
        10,
        Files(holds_cifar10, f"download cifar-10-binary.tar.gz {_CIFAR_PAGE}"),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        Normalisation((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        train_samples=50_000,
    ),
    "cifar100": NamedSource(
        read_cifar100,
        (3, 32, 32),
        100,
        Files(holds_cifar100, f"download cifar-100-binary.tar.gz {_CIFAR_PAGE}"),
        published=Normalisation((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
        train_samples=50_000,
    ),
    "tinyimagenet": NamedSource(
        read_tiny_imagenet,
        (3, 64, 64),
        200,
        Files(holds_tiny_imagenet, "download tiny-imagenet-200.zip from Stanford's course CS231n and unpack it"),
        published=Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        train_samples=100_000,
    ),
    "diabetes": NamedSource(lambda _: read_diabetes(), (10,), 1),
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
    source = SOURCES[name]
    return source.read(Path() if source.files is None else _find(name, source.files, folder))


def published_normalisation(name: str) -> Normalisation | None:
    """Return how FedHM's published code normalises the images of a data set; None if it does not use the data set."""
    return SOURCES[name].published if name in SOURCES else None


def is_in_folder(name: str, folder: Path | None) -> bool:
    """Tell whether `folder` holds the files of the data set `name`; False for Hugging Face's, which are not known."""
    files = SOURCES[name].files if name in SOURCES else None
    return files is not None and folder is not None and files.are_in(folder)


def is_found(name: str, folder: Path | None) -> bool:
    """Tell whether the files of a data set of `SOURCES` lie where `read_source` looks for them."""
    files = SOURCES[name].files
    return files is None or any(files.are_in(place) for place in _places(name, files, folder))


def default_folder(name: str) -> Path:
    """Return the folder in which the files of a data set are looked for first, if no setting names one."""
    return Path(os.environ.get("FEDHM_DATA", "data")) / name


def _find(name: str, files: Files, folder: Path | None) -> Path:
    places = _places(name, files, folder)
    for place in places:
        if files.are_in(place):
            return place
    fetch = quoted_command("fedhm", "data", name, *([] if folder is None else ["--to", folder]))
    raise FedhmError(
        f"{name} was not found in {' or '.join(str(place) for place in places)}: fetch it with {fetch}, or "
        f"{files.how_to_get}. The setting data.folder, or the environment variable FEDHM_DATA, names the place."
    )


def _places(name: str, files: Files, folder: Path | None) -> list[Path]:
    if folder is not None:
        return [folder]
    own = default_folder(name)
    shared = [own.parent] if files.shares_folder else []
    return [own, *shared, *files.installed_in]
