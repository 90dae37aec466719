"""Diabetes: the progression of a disease in 442 patients, to be predicted from ten measurements. In scikit-learn.

Measurements and progression are brought to mean 0 and deviation 1, by those of the patients to train on.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from fedhm.data.text import TEXTS, TextReader, TokenizingBar, with_targets
from fedhm.data.tokens import Tokens
from fedhm.errors import FedhmError
from fedhm.machine.pretrained import find_pretrained

TEST_EVERY = 5


def read_diabetes() -> Source:
    """Read the patients; every fifth is for testing, whatever the seed, so that metrics are comparable."""
    from sklearn.datasets import load_diabetes  # takes a second, which other sources need not

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


# Text with labels in local files, CSV, JSON or parquet, tokenized by the tokenizer of a pretrained model.

TEXT = "text:"
KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
LABELS = ("label", "labels", "category", "intent", "class", "speaker")


def read_text(name: str, folder: Path | None, base: str, max_length: int, per_token: bool) -> Source:
    """Read the files in `folder` whose names begin with `name` and have 'train' or 'test' in them."""
    place = folder or Path(os.environ.get("FEDHM_DATA", "data"))
    if not base:
        raise FedhmError(f"{TEXT}{name} is read by the tokenizer of a pretrained model: name one by model.base")
    train, test = (_read(_file(name, place, word)) for word in ("train", "test"))
    tokenizer = _tokenizer(base)
    numbers = {label: number for number, label in enumerate(sorted(set(train[1])))}
    if strange := [label for label in test[1] if label not in numbers]:
        raise FedhmError(f"{TEXT}{name} has a sample to test on with the label {strange[0]!r}, which is not trained on")
    parts = []
    with TokenizingBar(len(train[0]) + len(test[0]), shown=sys.stderr.isatty()) as bar:
        reader = TextReader(tokenizer, bar=bar)
        for texts, labels in (train, test):
            tokens = Tokens.of(reader.tokens(texts, max_length), f"{TEXT}{name}", tokenizer.pad_token_id or 0)
            known: Tensor = torch.tensor([numbers[label] for label in labels])
            parts.append(Samples(with_targets(tokens) if per_token else tokens, known))
    return Source(parts[0], parts[1], len(numbers), (), ())


def _file(name: str, place: Path, word: str) -> Path:
    found = sorted(f for f in place.glob(f"{name}*{word}*") if f.suffix in KINDS) if place.is_dir() else []
    if len(found) != 1:
        several = f"are {len(found)}" if found else "is none"
        raise FedhmError(
            f"{TEXT}{name} needs one file {name}*{word}* in {place} that ends in {', '.join(KINDS)}, of which there "
            f"{several}; the setting data.folder names the place"
        )
    return found[0]


def _read(file: Path) -> tuple[list[str], list[str]]:
    """Return texts and labels; without a column of labels, all have the same."""
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise FedhmError(f"reading {file} needs the package datasets ({error}): pip install 'fedhm[lora]'") from None
    bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory() as cache:  # read whole, so nothing needs to stay behind
            read = datasets.load_dataset(KINDS[file.suffix], data_files=str(file), cache_dir=cache, split="train")
            columns: dict[str, list[Any]] = {column: list(read[column]) for column in read.column_names}
    except Exception as error:  # of arrow, of pandas: they share no class of their own
        raise FedhmError(f"cannot read {file}: {str(error.__cause__ or error).partition(chr(10))[0]}") from error
    finally:
        if bars:
            datasets.enable_progress_bars()
    text = next((columns[column] for column in TEXTS if column in columns), None)
    if text is None or any(not isinstance(each, str) or not each for each in text):
        raise FedhmError(f"{file} must have a column {' or '.join(TEXTS)} with a text in every row")
    labels = next((columns[column] for column in LABELS if column in columns), [""] * len(text))
    if None in labels:
        raise FedhmError(f"{file} has a row without a label")
    return text, [str(label) for label in labels]


def _tokenizer(base: str) -> Any:
    folder = find_pretrained(base)
    try:
        return import_module("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise FedhmError(f"tokenizing needs the package transformers ({error}): pip install 'fedhm[lora]'") from None
    except (OSError, ValueError) as error:
        raise FedhmError(f"{folder} has no tokenizer that can be read: {str(error).partition(chr(10))[0]}") from None


# The data sets known by name, and where on disk each is looked for.

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


def is_in_folder(name: str, folder: Path | None) -> bool:
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
