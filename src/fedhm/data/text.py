"""Text: tokenizing it, reading users' data and files, and the limits of models that read it.

Inside the library, text is `Tokens`. Users hand in texts with a tokenizer, a tokenizer's result, or a data set of
Hugging Face. `data.source = "text:NAME"` names CSV, JSON or parquet files.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from warnings import warn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from fedhm.data.samples import Samples, Source
from fedhm.data.tokens import IDS, MASK, TARGETS, TYPES, Tokens
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.machine.extras import how_to_install
from fedhm.machine.pretrained import NO_DOWNLOAD_NO_CODE, find_pretrained

TEXT = "text:"  # in data.source
TEXT_COLUMNS = ("text", "sentence", "utterance")  # names of a data set's column of texts
LABEL_COLUMNS = ("label", "labels")
FILE_LABEL_COLUMNS = ("label", "labels", "category", "intent", "class", "speaker")
FIELDS = (IDS, MASK, TYPES, TARGETS)  # that are read of a tokenizer's result
# inputs of some models that would not reach them
UNSUPPORTED = ("position_ids", "inputs_embeds", "decoder_input_ids", "global_attention_mask", "bbox", "pixel_values")
FILE_KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
CHUNK = 1000  # texts tokenized between two steps of the progress bar


class TokenizingBar:
    """A progress bar of tokenized texts, on stderr: stdout belongs to the program."""

    def __init__(self, total: int | None, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=14),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not shown,
        )
        self._bar = self._progress.add_task("tokenizing", total=total)

    def __enter__(self) -> "TokenizingBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def read(self, texts: int) -> None:
        self._progress.advance(self._bar, texts)


@dataclass(frozen=True)
class TextReader:
    """A tokenizer, and the most tokens that the model reads of a text; None: the tokenizer's own limit."""

    tokenizer: Any
    longest: int | None = None
    bar: TokenizingBar | None = None

    def __post_init__(self) -> None:
        if not callable(self.tokenizer) or not hasattr(self.tokenizer, "pad_token_id"):
            raise FedhmError(f"tokenizer must be one of transformers, not a {type(self.tokenizer).__name__}")

    @property
    def padding(self) -> int | None:
        """Return the padding token; a tokenizer without one, as GPT-2's, pads with the token that ends a text."""
        own, end = self.tokenizer.pad_token_id, getattr(self.tokenizer, "eos_token_id", None)
        found: int | None = end if own is None else own
        return found

    def tokens(self, texts: Sequence[str], at_most: int | None = None) -> dict[str, list[list[int]]]:
        """Return token ids and masks of texts, cut to `at_most` tokens, or to what the model can read."""
        own = min(self.longest or sys.maxsize, getattr(self.tokenizer, "model_max_length", sys.maxsize))
        most = at_most or own
        cut = {"truncation": True, "max_length": most} if most < sys.maxsize else {}
        found: dict[str, list[list[int]]] = {IDS: [], MASK: []}
        for start in range(0, len(texts), CHUNK):
            read = self.tokenizer(list(texts[start : start + CHUNK]), **cut)
            found[IDS] += read[IDS]
            found[MASK] += read[MASK] if MASK in read else [[1] * len(ids) for ids in read[IDS]]
            if self.bar is not None:
                self.bar.read(len(read[IDS]))
        return found


def text_column(columns: Mapping[str, Any]) -> list[str] | None:
    """Return the texts of a data set, if it has a column of texts."""
    found = next((columns[name] for name in TEXT_COLUMNS if name in columns), None)
    return list(found) if found is not None and are_texts(found) else None


def are_texts(given: Any) -> bool:
    """Tell whether this is a list of texts; numpy arrays and columns of Hugging Face count, too."""
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__getitem__") or not hasattr(given, "__len__"):
        return False
    if getattr(given, "ndim", 1) == 0:  # a single number, which has no length
        return False
    return len(given) > 0 and all(isinstance(each, str) for each in given)


def count_samples(given: Any) -> int:
    """Return the number of samples in a pair or a data set; 0 if it has no length."""
    samples = given[0] if isinstance(given, tuple) and len(given) == 2 else given
    try:
        return len(samples)
    except TypeError:
        return 0


def tokenize(reader: TextReader | None, texts: Sequence[str], whose: str) -> dict[str, list[list[int]]]:
    """Return the tokens of texts; without a reader they are refused."""
    if reader is None:
        raise FedhmError(
            f"{whose} has texts, and a model reads tokens: hand in tokenizer(texts) in their place, or give fedhm.run "
            "the tokenizer by tokenizer="
        )
    return reader.tokens(texts)


class Text(NamedTuple):
    """Tokens with their labels."""

    tokens: Tokens
    labels: Tensor  # of each sequence; zeros if every token has a target


def to_text(data: Any, whose: str, per_token: bool, reader: TextReader | None = None) -> Text | None:
    """Return a user's data as text; None if it is something else.

    per_token  every token has a target: its entry in `labels`, or the token itself
    reader     tokenizes texts
    """
    samples = getattr(data, "inputs", None)
    if isinstance(samples, Tokens):
        return Text(samples, data.labels)
    pair = isinstance(data, tuple) and len(data) == 2
    given, labels = data if pair else (data, None)
    columns = given if isinstance(given, Mapping) or hasattr(given, "keys") else _columns(given)
    padding = 0
    if columns is None or IDS not in columns:
        others = {} if columns is None else columns
        texts = given if pair and are_texts(given) else text_column(others)
        if texts is None:
            return None
        columns = {name: others[name] for name in LABEL_COLUMNS if name in others} | tokenize(reader, texts, whose)
        padding = (reader and reader.padding) or 0
    if unsupported := [name for name in UNSUPPORTED if name in columns]:
        raise FedhmError(f"{whose} has '{unsupported[0]}', which is not handed on to the model: leave it out")
    found = {name: _sequences(columns[name], whose, name) for name in FIELDS if name in columns}
    if not pair:
        own = next((columns[name] for name in LABEL_COLUMNS if name in columns), None)
        labels = None if per_token else own
    if not per_token:
        found.pop(TARGETS, None)
        if labels is None:
            raise FedhmError(f"{whose} has tokens, but no column 'label' with a class number for each sample")
    if MASK in found:
        found = _without_padding(found)
    tokens = Tokens.of(found, whose, padding)
    if per_token:
        tokens = with_targets(tokens)
        tokens.check_targets(whose)
    return Text(tokens, _numbers(labels, len(tokens), whose))


def with_targets(tokens: Tokens) -> Tokens:
    """Return the sequences with targets: unless they have some, every token is its own target."""
    if TARGETS in tokens.fields:
        return tokens
    fields = tokens.fields
    return Tokens({**fields, TARGETS: fields[IDS].masked_fill(fields[MASK] == 0, -100)}, tokens.starts, tokens.padding)


def _columns(data: Any) -> Mapping[str, Any] | None:
    """Return all columns of a data set of Hugging Face; None for anything else."""
    names = getattr(data, "column_names", None)
    if not isinstance(names, list) or not {IDS, *TEXT_COLUMNS} & set(names):
        return None
    rows = data.with_format(None)[:]
    return {name: rows[name] for name in names}


def _sequences(given: Any, whose: str, name: str) -> list[list[int]]:
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, Sequence):
        given = [each.tolist() if hasattr(each, "tolist") else each for each in given]
    if not isinstance(given, Sequence) or any(not isinstance(each, Sequence) for each in given):
        if name == TARGETS:  # transformers calls class numbers by the same name
            return [[int(each)] for each in given]
        raise FedhmError(f"the '{name}' of {whose} must be a list of token numbers for each sample")
    return [list(each) for each in given]


def _without_padding(found: Mapping[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Remove a tokenizer's padding on the right: batches are padded to their own longest sequence."""
    lengths = [max((n for n, counts in enumerate(mask, start=1) if counts), default=1) for mask in found[MASK]]
    return {name: [s[:n] for s, n in zip(each, lengths, strict=True)] for name, each in found.items()}


def _numbers(labels: Any, count: int, whose: str) -> Tensor:
    if labels is None:
        return torch.zeros(count, dtype=torch.int64)
    try:
        found = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise FedhmError(f"the labels of {whose} must be class numbers, or numbers to predict") from None
    if len(found) != count:
        raise FedhmError(f"{whose} has {count} sequences, but {len(found)} labels")
    return found


@dataclass(frozen=True)
class TextLimits:
    """The limits of a model that reads text; None: unknown."""

    tokens: int | None = None  # in its vocabulary
    length: int | None = None  # of a text
    types: int | None = None  # of segments, in `token_type_ids`
    padding: int | None = None  # the padding token
    needs_padding: bool = False  # its classifier looks for the last token before the padding

    def fitted(self, samples: Samples, whose: str) -> Samples:
        """Return samples with the padding token of the model; refuse text that it cannot read."""
        text = samples.inputs
        if not isinstance(text, Tokens) or not len(text):
            return samples
        if self.needs_padding and self.padding is None:
            raise FedhmError(
                "the model classifies a text by its last token, and has no token of padding to find that by: set "
                "model.config.pad_token_id to the tokenizer's, or give fedhm.run the tokenizer by tokenizer="
            )
        self.check(whose, int(text.lengths.max()), text.largest(IDS), text.largest(TYPES))
        return samples if self.padding is None else replace(samples, inputs=text.with_padding_id(self.padding))

    def check(self, whose: str, longest: int, largest: int, kinds: int = 0) -> None:
        """Refuse text of another model's tokenizer, and text that is longer than the model can read."""
        if self.tokens is not None and largest >= self.tokens:
            raise FedhmError(
                f"the tokenizer of {whose} does not fit the model: there is a token {largest}, but the model knows "
                f"{self.tokens}; use the tokenizer that came with it"
            )
        if self.tokens is not None and self.padding is not None and self.padding >= self.tokens:
            raise FedhmError(f"the model is padded with token {self.padding}, but knows {self.tokens} tokens")
        if self.types is not None and kinds >= self.types:
            raise FedhmError(f"{whose} has '{TYPES}' up to {kinds}, but the model knows {self.types} of them")
        if self.length is not None and longest > self.length:
            raise FedhmError(
                f"{whose}: a text has {longest} tokens, but the model reads at most {self.length}: set "
                "data.max_length, or let the tokenizer truncate"
            )


def check_tokenizer(tokenizer: Any, model: nn.Module) -> None:
    """Warn if the tokenizer seems to belong to another model.

    A smaller vocabulary causes no error later. Models have a few percent more tokens than their tokenizers, for round
    numbers, but none has twice as many.
    """
    known = text_limits(model).tokens
    if known is not None and hasattr(tokenizer, "__len__") and 2 * len(tokenizer) < known:
        warn(
            f"the tokenizer has {len(tokenizer)} tokens and the model {known}: it seems to be another model's, whose "
            "tokens mean nothing to this one; use the tokenizer that came with the model",
            FedhmWarning,
            stacklevel=3,
        )


def text_limits(model: nn.Module) -> TextLimits:
    """Return the limits of a model that reads text; other models have none."""
    find, config = getattr(model, "get_input_embeddings", None), getattr(model, "config", None)
    try:
        embeddings = find() if callable(find) else None
    except (NotImplementedError, AttributeError):  # raised by image models of transformers
        embeddings = None
    padding = getattr(config, "pad_token_id", None)
    return TextLimits(
        getattr(embeddings, "num_embeddings", None),
        _length(model, config),
        next((table.num_embeddings for table in _tables(model, "token_type_embeddings")), None),
        padding if isinstance(padding, int) and padding >= 0 else None,  # some models say -1 for none
        hasattr(config, "pad_token_id") and isinstance(getattr(model, "score", None), nn.Module),
    )


def with_padding_token(model: nn.Module, padding: int | None) -> nn.Module:
    """Return the model with a padding token, if it has none: the same weights with another config."""
    config = getattr(model, "config", None)
    if padding is None or getattr(config, "pad_token_id", padding) is not None:
        return model
    other: Any = copy(model)  # the user's model does not change
    other.config = deepcopy(config)
    other.config.pad_token_id = padding
    found: nn.Module = other
    return found


def _length(model: nn.Module, config: Any) -> int | None:
    most: int | None = getattr(config, "max_position_embeddings", None)
    for table in _tables(model, "position_embeddings"):
        if table.padding_idx is not None:  # RoBERTa: positions begin after the padding index
            return table.num_embeddings - table.padding_idx - 1
    return most if isinstance(most, int) else None


def _tables(model: nn.Module, name: str) -> Iterator[nn.Embedding]:
    for own, module in model.named_modules():
        if isinstance(module, nn.Embedding) and own.rpartition(".")[2] == name:
            yield module


def read_text_files(name: str, folder: Path | None, base: str, max_length: int, per_token: bool) -> Source:
    """Read the files in `folder` whose names begin with `name` and have 'train' or 'test' in them."""
    place = folder or Path(os.environ.get("FEDHM_DATA", "data"))
    if not base:
        raise FedhmError(f"{TEXT}{name} is read by the tokenizer of a pretrained model: name one by model.base")
    train, test = (_read_file(_find_file(name, place, word)) for word in ("train", "test"))
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


def _find_file(name: str, place: Path, word: str) -> Path:
    found = sorted(f for f in place.glob(f"{name}*{word}*") if f.suffix in FILE_KINDS) if place.is_dir() else []
    if len(found) != 1:
        several = f"are {len(found)}" if found else "is none"
        raise FedhmError(
            f"{TEXT}{name} needs one file {name}*{word}* in {place} that ends in {', '.join(FILE_KINDS)}, of which "
            f"there {several}; the setting data.folder names the place"
        )
    return found[0]


def _read_file(file: Path) -> tuple[list[str], list[str]]:
    """Return texts and labels; without a column of labels, all labels are equal."""
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise FedhmError(f"reading {file} needs the package datasets ({error}): {how_to_install('lora')}") from None
    bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory() as cache:  # the data is read whole, so the cache can go
            read = datasets.load_dataset(FILE_KINDS[file.suffix], data_files=str(file), cache_dir=cache, split="train")
            columns: dict[str, list[Any]] = {column: list(read[column]) for column in read.column_names}
    except Exception as error:  # errors of arrow and pandas have no common class
        raise FedhmError(f"cannot read {file}: {str(error.__cause__ or error).partition(chr(10))[0]}") from error
    finally:
        if bars:
            datasets.enable_progress_bars()
    text = next((columns[column] for column in TEXT_COLUMNS if column in columns), None)
    if text is None or any(not isinstance(each, str) or not each for each in text):
        raise FedhmError(f"{file} must have a column {' or '.join(TEXT_COLUMNS)} with a text in every row")
    labels = next((columns[column] for column in FILE_LABEL_COLUMNS if column in columns), [""] * len(text))
    if None in labels:
        raise FedhmError(f"{file} has a row without a label")
    return text, [str(label) for label in labels]


def _tokenizer(base: str) -> Any:
    folder = find_pretrained(base)
    try:
        return import_module("transformers").AutoTokenizer.from_pretrained(folder, **NO_DOWNLOAD_NO_CODE)
    except ImportError as error:
        raise FedhmError(f"tokenizing needs the package transformers ({error}): {how_to_install('lora')}") from None
    except (OSError, ValueError) as error:
        raise FedhmError(f"{folder} has no tokenizer that can be read: {str(error).partition(chr(10))[0]}") from None
