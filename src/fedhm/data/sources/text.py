"""Text with labels in local files, CSV, JSON or parquet, tokenized by the tokenizer of a pretrained model."""

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedhm.data.raw_text import TEXTS, TextReader
from fedhm.data.samples import Samples, Source
from fedhm.data.text import with_targets
from fedhm.data.tokenizing import TokenizingBar
from fedhm.data.tokens import Tokens
from fedhm.errors import FedhmError
from fedhm.machine.pretrained import find_pretrained

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
