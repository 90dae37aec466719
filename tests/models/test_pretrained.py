"""Pretrained transformers that classify by the mean of their tokens, and without dropout."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fedhm.data.text import text_limits
from fedhm.models.pretrained import MeanPooled, read_pretrained
from tiny_transformers import tiny_bert, tiny_gpt2_classifier

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place: Path = tmp_path_factory.mktemp("base")
    model = tiny_bert()
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.3
    model.save_pretrained(place)
    return str(place)


def test_the_mean_is_over_tokens_and_not_over_padding(folder: str) -> None:
    model = read_pretrained(folder, 3, False, 0, "mean").eval()
    assert isinstance(model, MeanPooled)
    ids, mask = torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    found = model(input_ids=ids, attention_mask=mask)
    alone = model(input_ids=ids[:1, :3], attention_mask=mask[:1, :3])
    torch.testing.assert_close(found[:1], alone)
    states = model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found[1], model.classifier(states[1].mean(0)))
    assert torch.equal(model.classifier.weight, read_pretrained(folder, 3, False, 0, "mean").classifier.weight)
    text_limits(model).check("it", longest=4, largest=11)


@pytest.mark.parametrize(("dropout", "expected"), [("own", {0.3}), (0.0, {0.0})])
def test_dropout_is_the_models_own_or_as_the_settings_say(folder: str, dropout: float | str, expected: set) -> None:
    model = read_pretrained(folder, 3, False, 0, "own", dropout)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == expected


@pytest.mark.parametrize("padding", ["[PAD]", None])
def test_a_model_without_a_token_of_padding_gets_its_tokenizers(padding: str | None, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tiny_gpt2_classifier(None).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "[END]": 2}, "[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token=padding, eos_token="[END]").save_pretrained(tmp_path)
    assert read_pretrained(str(tmp_path), 3, False, 0).config.pad_token_id == (1 if padding else 2)
    assert read_pretrained(str(tmp_path), 3, True, 0).config.pad_token_id is None
