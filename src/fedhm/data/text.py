"""Text that a user hands in: what a tokenizer gives, a data set of Hugging Face, or texts and who is to read them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedhm.data.raw_text import TEXTS, TextReader, are_texts, read_by, texts_in
from fedhm.data.tokens import IDS, MASK, TARGETS, TYPES, Tokens
from fedhm.errors import FedhmError

READ = (IDS, MASK, TYPES, TARGETS)  # what is read of a tokenizer's result
LABEL = ("label", "labels")
# what models may be told beside these, and would not be
UNREAD = ("position_ids", "inputs_embeds", "decoder_input_ids", "global_attention_mask", "bbox", "pixel_values")


class Text(NamedTuple):
    tokens: Tokens
    labels: Tensor  # of each sequence; zeros where every token has a target


def as_text(data: Any, whose: str, per_token: bool, reader: TextReader | None = None) -> Text | None:
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
        texts = given if pair and are_texts(given) else texts_in(others)
        if texts is None:
            return None
        columns = {name: others[name] for name in LABEL if name in others} | read_by(reader, texts, whose)
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
