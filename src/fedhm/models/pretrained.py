"""Pretrained transformers, read from safetensors on disk: nothing is downloaded, and nothing is unpickled."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.machine.extras import how_to_install
from fedhm.machine.pretrained import NO_DOWNLOAD_NO_CODE, ONLY_SAFETENSORS, check_no_pickle, find_pretrained


class MeanPooled(nn.Module):
    """An encoder of transformers with a linear layer on the mean of its outputs (`model.pooling = "mean"`).

    Sentence encoders are trained for this mean.
    """

    def __init__(self, encoder: nn.Module, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder
        settings: Any = encoder.config
        self.config = settings  # peft and others look for the kind of model here
        self.classifier = nn.Linear(settings.hidden_size, outputs)
        nn.init.normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.encoder.get_input_embeddings()  # type: ignore[operator]
        return found

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **more: Tensor) -> Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **more).last_hidden_state  # (B, T, d)
        counted = attention_mask[..., None].to(states.dtype)
        scores: Tensor = self.classifier((states * counted).sum(1) / counted.sum(1))
        return scores


def read_pretrained(
    base: str, outputs: int, per_token: bool, seed: int, pooling: str = "own", dropout: float | str = "own"
) -> nn.Module:
    """Read a pretrained model: with a new head for `outputs` classes, drawn from a seed, or as a language model.

    pooling  "own": the head that transformers has for the model; "mean": a head on the mean of all tokens
    dropout  of all layers in training; "own": the model's own
    """
    folder = find_pretrained(base)
    check_no_pickle(base, folder)
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise FedhmError(f"a transformer needs the package transformers ({error}): {how_to_install('lora')}") from None
    kind = transformers.AutoModelForCausalLM if per_token else transformers.AutoModelForSequenceClassification
    kind = transformers.AutoModel if pooling == "mean" else kind
    options: dict[str, Any] = {} if per_token or pooling == "mean" else {"num_labels": outputs}
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # no warning that the head is new, and no progress bar
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            settings = transformers.AutoConfig.from_pretrained(folder, **NO_DOWNLOAD_NO_CODE, **options)
            _set_dropout(settings, dropout)
            if not per_token and getattr(settings, "pad_token_id", 0) is None:
                settings.pad_token_id = _padding(transformers, folder)
            model: nn.Module = kind.from_pretrained(folder, config=settings, **ONLY_SAFETENSORS, dtype=torch.float32)
            if pooling == "mean":
                model = MeanPooled(model, outputs)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FedhmError(f"model.base = '{base}' cannot be read from {folder}: {reason}") from None
    finally:
        transformers.logging.set_verbosity(before)
        if bars:
            transformers.logging.enable_progress_bar()
    return model


def _padding(transformers: Any, folder: Path) -> int | None:
    """Return the tokenizer's padding token; without one, as in GPT-2, the token that ends a text."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **NO_DOWNLOAD_NO_CODE)
    except (OSError, ValueError):  # the tokenizer is read again with the data, and refused there
        return None
    found: int | None = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return found


def _set_dropout(settings: Any, dropout: float | str) -> None:
    """Set all dropout rates; kinds of models have different names for them."""
    if dropout == "own":
        return
    for name, value in vars(settings).items():
        if isinstance(value, float) and any(word in name for word in ("dropout", "pdrop")):
            setattr(settings, name, dropout)
