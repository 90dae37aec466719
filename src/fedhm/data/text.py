"""How far the tokenizing of texts is, in a terminal: a bar that goes when all of them are read."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from warnings import warn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from fedhm.data.samples import Samples
from fedhm.data.tokens import IDS, MASK, TARGETS, TYPES, Tokens
from fedhm.errors import FedhmError, FedhmWarning


class TokenizingBar:
    """Texts that are read so far, of all that a run has; on stderr, so that what a program prints is its own."""

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


# Text that a user hands in as it was written: a tokenizer of transformers makes tokens of it.

TEXTS = ("text", "sentence", "utterance")  # how data sets call the column of texts
AT_ONCE = 1000  # texts, after which a progress bar is told


@dataclass(frozen=True)
class TextReader:
    """A tokenizer, and how many tokens the model reads of a text; None: as many as the tokenizer says."""

    tokenizer: Any
    longest: int | None = None
    bar: TokenizingBar | None = None

    def __post_init__(self) -> None:
        if not callable(self.tokenizer) or not hasattr(self.tokenizer, "pad_token_id"):
            raise FedhmError(f"tokenizer must be one of transformers, not a {type(self.tokenizer).__name__}")

    @property
    def padding(self) -> int | None:
        """Return the token that it fills up with; if it has none, as GPT-2's, the one that ends a text."""
        own, end = self.tokenizer.pad_token_id, getattr(self.tokenizer, "eos_token_id", None)
        found: int | None = end if own is None else own
        return found

    def tokens(self, texts: Sequence[str], at_most: int | None = None) -> dict[str, list[list[int]]]:
        """Return token numbers and masks of texts, which are cut: `at_most` so long, or what the model can read."""
        own = min(self.longest or sys.maxsize, getattr(self.tokenizer, "model_max_length", sys.maxsize))
        most = at_most or own
        cut = {"truncation": True, "max_length": most} if most < sys.maxsize else {}
        found: dict[str, list[list[int]]] = {IDS: [], MASK: []}
        for start in range(0, len(texts), AT_ONCE):
            read = self.tokenizer(list(texts[start : start + AT_ONCE]), **cut)
            found[IDS] += read[IDS]
            found[MASK] += read[MASK] if MASK in read else [[1] * len(ids) for ids in read[IDS]]
            if self.bar is not None:
                self.bar.read(len(read[IDS]))
        return found


def text_column(columns: Mapping[str, Any]) -> list[str] | None:
    """Return the texts of a data set, if it has a column of such."""
    found = next((columns[name] for name in TEXTS if name in columns), None)
    return list(found) if found is not None and are_texts(found) else None


def are_texts(given: Any) -> bool:
    """Tell whether this is a list of texts, of arrays of numpy's and columns of Hugging Face, too."""
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__getitem__") or not hasattr(given, "__len__"):
        return False
    return len(given) > 0 and all(isinstance(each, str) for each in given)


def count_samples(given: Any) -> int:
    """Return how many samples a user handed in, as a pair or as a data set; 0 where that cannot be told."""
    samples = given[0] if isinstance(given, tuple) and len(given) == 2 else given
    try:
        return len(samples)
    except TypeError:
        return 0


def tokenize(reader: TextReader | None, texts: Sequence[str], whose: str) -> dict[str, list[list[int]]]:
    """Return the tokens of texts, or say that there is nobody to read them."""
    if reader is None:
        raise FedhmError(
            f"{whose} has texts, and a model reads tokens: hand in tokenizer(texts) in their place, or give fedhm.run "
            "the tokenizer by tokenizer="
        )
    return reader.tokens(texts)


# Text that a user hands in: what a tokenizer gives, a data set of Hugging Face, or texts and who is to read them.

READ = (IDS, MASK, TYPES, TARGETS)  # what is read of a tokenizer's result
LABEL = ("label", "labels")
# what models may be told beside these, and would not be
UNREAD = ("position_ids", "inputs_embeds", "decoder_input_ids", "global_attention_mask", "bbox", "pixel_values")


class Text(NamedTuple):
    tokens: Tokens
    labels: Tensor  # of each sequence; zeros where every token has a target


def to_text(data: Any, whose: str, per_token: bool, reader: TextReader | None = None) -> Text | None:
    """Return what a user handed in if it is text; None if it is something else.

    per_token  every token has a target: its own `labels`, or the token itself
    reader     makes tokens of what is not tokenized yet
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
        columns = {name: others[name] for name in LABEL if name in others} | tokenize(reader, texts, whose)
        padding = (reader and reader.padding) or 0
    if unread := [name for name in UNREAD if name in columns]:
        raise FedhmError(f"{whose} has '{unread[0]}', which is not handed on to the model: leave it out")
    found = {name: _sequences(columns[name], whose, name) for name in READ if name in columns}
    if not pair:
        own = next((columns[name] for name in LABEL if name in columns), None)
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
    """Return sequences in which every token that has no target of its own is one."""
    if TARGETS in tokens.fields:
        return tokens
    fields = tokens.fields
    return Tokens({**fields, TARGETS: fields[IDS].masked_fill(fields[MASK] == 0, -100)}, tokens.starts, tokens.padding)


def _columns(data: Any) -> Mapping[str, Any] | None:
    """Return the columns of a data set of Hugging Face, whole; None of anything else."""
    names = getattr(data, "column_names", None)
    if not isinstance(names, list) or not {IDS, *TEXTS} & set(names):
        return None
    rows = data.with_format(None)[:]
    return {name: rows[name] for name in names}


def _sequences(given: Any, whose: str, name: str) -> list[list[int]]:
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, Sequence):
        given = [each.tolist() if hasattr(each, "tolist") else each for each in given]
    if not isinstance(given, Sequence) or any(not isinstance(each, Sequence) for each in given):
        if name == TARGETS:  # class numbers under the name that transformers have for both
            return [[int(each)] for each in given]
        raise FedhmError(f"the '{name}' of {whose} must be a list of token numbers for each sample")
    return [list(each) for each in given]


def _without_padding(found: Mapping[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Cut what a tokenizer has filled up on the right: batches are padded to their own longest sequence."""
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


# What a model can read of text, and what it is padded with: both are known only where the model is.


@dataclass(frozen=True)
class TextLimits:
    """How many tokens a model knows, how many it reads of a text, and which one stands for none; None: not known."""

    tokens: int | None = None
    length: int | None = None
    types: int | None = None  # kinds of segments, as `token_type_ids` number them
    padding: int | None = None
    needs_padding: bool = False  # its classifier looks for the last token before the padding

    def fitted(self, samples: Samples, whose: str) -> Samples:
        """Return samples padded as the model expects it; refuse text that it cannot read."""
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
        """Refuse text that was read by a tokenizer of another model, or that is longer than the model can read."""
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
    """Warn of a tokenizer that seems to be another model's: a smaller one gives no token that would tell it.

    Models have up to some percent more tokens than their tokenizers, for round numbers; none has twice as many.
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
    """Return the limits of a model that reads text; of others, none."""
    find, config = getattr(model, "get_input_embeddings", None), getattr(model, "config", None)
    try:
        embeddings = find() if callable(find) else None
    except (NotImplementedError, AttributeError):  # as transformers have it for models of images
        embeddings = None
    padding = getattr(config, "pad_token_id", None)
    return TextLimits(
        getattr(embeddings, "num_embeddings", None),
        _length(model, config),
        next((table.num_embeddings for table in _tables(model, "token_type_embeddings")), None),
        padding if isinstance(padding, int) and padding >= 0 else None,  # some have -1 for none
        hasattr(config, "pad_token_id") and isinstance(getattr(model, "score", None), nn.Module),
    )


def with_padding_token(model: nn.Module, padding: int | None) -> nn.Module:
    """Return a model that pads with a token where it has none of its own: the same weights, under another config."""
    config = getattr(model, "config", None)
    if padding is None or getattr(config, "pad_token_id", padding) is not None:
        return model
    other: Any = copy(model)  # the user's own stays as it is
    other.config = deepcopy(config)
    other.config.pad_token_id = padding
    found: nn.Module = other
    return found


def _length(model: nn.Module, config: Any) -> int | None:
    most: int | None = getattr(config, "max_position_embeddings", None)
    for table in _tables(model, "position_embeddings"):
        if table.padding_idx is not None:  # as RoBERTa's, whose positions begin after the number of its padding
            return table.num_embeddings - table.padding_idx - 1
    return most if isinstance(most, int) else None


def _tables(model: nn.Module, name: str) -> Iterator[nn.Embedding]:
    for own, module in model.named_modules():
        if isinstance(module, nn.Embedding) and own.rpartition(".")[2] == name:
            yield module
