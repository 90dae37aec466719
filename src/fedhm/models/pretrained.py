"""A classifier of texts on the mean of their tokens' outputs, as sentence encoders are trained to be read."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.machine.pretrained import find_pretrained


class MeanPooled(nn.Module):
    """An encoder of transformers with a linear layer on the mean of its outputs, as `model.pooling = "mean"` has it."""

    def __init__(self, encoder: nn.Module, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder
        settings: Any = encoder.config
        self.config = settings  # where peft and others look for what kind of model this is
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


# Pretrained transformers, read from disk: nothing is downloaded.


def read_pretrained(
    base: str, outputs: int, per_token: bool, seed: int, pooling: str = "own", dropout: float | str = "own"
) -> nn.Module:
    """Read a pretrained model with a new head for so many classes, drawn from a seed, or as a language model.

    pooling  "own": the head that transformers have for the model; "mean": one on the mean of all tokens
    dropout  of all its layers, in training; "own": as the model says
    """
    folder = find_pretrained(base)
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise FedhmError(f"a transformer needs the package transformers ({error}): pip install 'fedhm[lora]'") from None
    kind = transformers.AutoModelForCausalLM if per_token else transformers.AutoModelForSequenceClassification
    kind = transformers.AutoModel if pooling == "mean" else kind
    options: dict[str, Any] = {} if per_token or pooling == "mean" else {"num_labels": outputs}
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # that a new head is new, and a progress bar
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            settings = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **options)
            _set_dropout(settings, dropout)
            if not per_token and getattr(settings, "pad_token_id", 0) is None:
                settings.pad_token_id = _padding(transformers, folder)
            model: nn.Module = kind.from_pretrained(folder, config=settings, local_files_only=True, dtype=torch.float32)
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
    """Return what the model's tokenizer pads with; if it does not, as GPT-2's, the token that ends a text."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):  # it is read again with the data, and that says what is wrong
        return None
    found: int | None = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return found


def _set_dropout(settings: Any, dropout: float | str) -> None:
    """Set all shares of dropout, under whichever names a kind of model has for them."""
    if dropout == "own":
        return
    for name, value in vars(settings).items():
        if isinstance(value, float) and any(word in name for word in ("dropout", "pdrop")):
            setattr(settings, name, dropout)
