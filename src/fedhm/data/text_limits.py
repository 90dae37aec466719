"""What a model can read of text, and what it is padded with: both are known only where the model is."""

from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any
from warnings import warn

from torch import nn

from fedhm.data.samples import Samples
from fedhm.data.tokens import IDS, TYPES, Tokens
from fedhm.errors import FedhmError, FedhmWarning


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
        return samples if self.padding is None else replace(samples, inputs=text.padded_with(self.padding))

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
    known = limits_of(model).tokens
    if known is not None and hasattr(tokenizer, "__len__") and 2 * len(tokenizer) < known:
        warn(
            f"the tokenizer has {len(tokenizer)} tokens and the model {known}: it seems to be another model's, whose "
            "tokens mean nothing to this one; use the tokenizer that came with the model",
            FedhmWarning,
            stacklevel=3,
        )


def limits_of(model: nn.Module) -> TextLimits:
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


def with_padding(model: nn.Module, padding: int | None) -> nn.Module:
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
