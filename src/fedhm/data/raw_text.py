"""Text that a user hands in as it was written: a tokenizer of transformers makes tokens of it."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedhm.data.tokenizing import TokenizingBar
from fedhm.data.tokens import IDS, MASK
from fedhm.errors import FedhmError

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


def texts_in(columns: Mapping[str, Any]) -> list[str] | None:
    """Return the texts of a data set, if it has a column of such."""
    found = next((columns[name] for name in TEXTS if name in columns), None)
    return list(found) if found is not None and are_texts(found) else None


def are_texts(given: Any) -> bool:
    """Tell whether this is a list of texts, of arrays of numpy's and columns of Hugging Face, too."""
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__getitem__") or not hasattr(given, "__len__"):
        return False
    return len(given) > 0 and all(isinstance(each, str) for each in given)


def how_many(given: Any) -> int:
    """Return how many samples a user handed in, as a pair or as a data set; 0 where that cannot be told."""
    samples = given[0] if isinstance(given, tuple) and len(given) == 2 else given
    try:
        return len(samples)
    except TypeError:
        return 0


def read_by(reader: TextReader | None, texts: Sequence[str], whose: str) -> dict[str, list[list[int]]]:
    """Return the tokens of texts, or say that there is nobody to read them."""
    if reader is None:
        raise FedhmError(
            f"{whose} has texts, and a model reads tokens: hand in tokenizer(texts) in their place, or give fedhm.run "
            "the tokenizer by tokenizer="
        )
    return reader.tokens(texts)
