"""Tiny transformers with random weights, and text that can be learnt: nothing is downloaded."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# looked for, and not imported: that takes seconds, in every process that only collects the tests
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="there is no peft here")


def _drawn(kind: Callable[[Any], nn.Module], settings: object, seed: int) -> nn.Module:
    """Return a model whose random weights are those of a seed; what else is drawn at random stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(settings)


def tiny_bert(classes: int = 3, seed: int = 0) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    settings = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, num_labels=classes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _drawn(BertForSequenceClassification, settings, seed)


def tiny_roberta(seed: int = 0) -> nn.Module:
    """Return a RoBERTa, whose head has two layers, and whose positions begin after its padding's number."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    settings = RobertaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=18, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=1,
    )  # fmt: skip
    return _drawn(RobertaForSequenceClassification, settings, seed)


def tiny_distilbert(seed: int = 0) -> nn.Module:
    """Return a DistilBERT, whose head is two modules."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    settings = DistilBertConfig(
        vocab_size=40, dim=16, hidden_dim=24, n_layers=1, n_heads=2, max_position_embeddings=16, num_labels=3,
        seq_classif_dropout=0.0, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return _drawn(DistilBertForSequenceClassification, settings, seed)


def tiny_gpt2_classifier(padding: int | None = None, seed: int = 0) -> nn.Module:
    """Return a GPT-2 that classifies by a text's last token, which it finds by the token of padding."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    settings = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16, num_labels=3, bos_token_id=1, eos_token_id=2,
        pad_token_id=padding, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _drawn(GPT2ForSequenceClassification, settings, seed)


def tiny_masked_bert(seed: int = 0) -> nn.Module:
    """Return a BERT that fills in words, by a head that is tied to its embedding."""
    from transformers import BertConfig, BertForMaskedLM

    settings = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16,
    )  # fmt: skip
    return _drawn(BertForMaskedLM, settings, seed)


def tiny_llama(seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16,
    )  # fmt: skip
    return _drawn(LlamaForCausalLM, settings, seed)


def tiny_gpt2(seed: int = 0) -> nn.Module:
    """Return a GPT-2, with fused qkv, linear layers that hold their weights transposed, and a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(
        vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _drawn(GPT2LMHeadModel, settings, seed)


def tiny_vit(classes: int = 3, seed: int = 0) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    settings = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, num_labels=classes,
    )  # fmt: skip
    return _drawn(ViTForImageClassification, settings, seed)


def sentences(
    count: int, seed: int, classes: int = 3, vocabulary: int = 40
) -> tuple[dict[str, list[list[int]]], Tensor]:
    """Return sentences of different lengths, most of whose words belong to their class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    ids = []
    for label in labels.tolist():
        length = int(torch.randint(3, 12, (), generator=generator))
        own = 4 + label + classes * torch.randint(0, 8, (length,), generator=generator)
        ids.append([1, *own.clamp(max=vocabulary - 1).tolist()])
    return {"input_ids": ids}, labels
