"""Texts as users have them: read by a tokenizer, or refused by a sentence that says so."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedhm
from fedhm.config.registry import make
from fedhm.data.convert import to_samples
from fedhm.data.samples import Samples
from fedhm.data.text import TextReader, check_tokenizer
from fedhm.errors import FedhmWarning
from made_adapters import TRAIN, settings
from tiny_transformers import needs_peft, tiny_bert, tiny_gpt2_classifier

pytestmark = [pytest.mark.slow, needs_peft]
WORDS = ["card", "lost", "pay", "rent", "rain", "sun", "my", "the"]
LABELS = [0, 1, 2] * 4
LINES = [f"{WORDS[2 * label]} the {' '.join(WORDS[6:8] * (number % 5))}" for number, label in enumerate(LABELS)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["[UNK]", "[END]", "[PAD]", *WORDS]
    known += [f"word{number}" for number in range(len(known), 40)]  # as many as the tiny models have
    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(known)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]")


class Rows(Dataset[dict[str, Any]]):
    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(LINES)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


def hugging_face(columns: dict[str, list[Any]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


def read(data: Any, reader: TextReader | None = None) -> Samples:
    return to_samples(data, "it", torch.float32, make("objectives", "classification"), reader)


@pytest.mark.parametrize("form", ["pair", "mapping", "hugging face", "rows"])
def test_texts_are_read_by_the_tokenizer_whatever_they_come_in(form: str, tokenizer: Any) -> None:
    columns = {"text": LINES, "label": LABELS}
    made = {"pair": lambda _: (LINES, LABELS), "mapping": dict, "hugging face": hugging_face, "rows": Rows}[form]
    expected = read((tokenizer(LINES), LABELS))
    found = read(made(columns), TextReader(tokenizer))
    assert found.labels.tolist() == LABELS
    assert torch.equal(found.inputs.fields["input_ids"], expected.inputs.fields["input_ids"])
    assert found.inputs.padding == 2
    with pytest.raises(fedhm.FedhmError, match=r"it has texts, and a model reads tokens: .*, or give .* by tokenizer="):
        read(made(columns))


def test_a_data_set_of_dicts_may_have_tokens_already(tokenizer: Any) -> None:
    tokens = [torch.tensor(ids) for ids in tokenizer(LINES)["input_ids"]]
    found = read(Rows({"input_ids": tokens, "labels": LABELS}))
    assert torch.equal(found.inputs.fields["input_ids"], torch.cat(tokens))
    assert found.labels.tolist() == LABELS


def test_texts_are_cut_to_what_the_model_reads(tokenizer: Any) -> None:
    long = (["the " * 30, "my card"], [0, 1])
    assert read(long, TextReader(tokenizer, 16)).inputs.lengths.tolist() == [16, 2]


def test_a_run_takes_texts_and_pads_with_the_tokenizers_token_where_the_model_has_none(tokenizer: Any) -> None:
    data, train = (LINES, LABELS), {**TRAIN, "rounds": 1}
    whole = fedhm.run(
        tiny_bert(),
        [data, data],
        data,
        settings({"ranks": [2]}, train=train),
        tokenizer=tokenizer,
        client_test=[data] * 2,
    )
    assert whole.clients["full"].overall.samples == 24
    model = tiny_gpt2_classifier(None)
    asked = settings({"ranks": [2], "target": "c_attn"}, train=train)
    result = fedhm.run(model, [data, data], data, asked, tokenizer=tokenizer)
    assert result.networks["full"].config.pad_token_id == 2
    assert model.config.pad_token_id is None


def test_what_is_no_tokenizer_and_what_is_no_text_are_one_sentence() -> None:
    with pytest.raises(fedhm.FedhmError, match="tokenizer must be one of transformers, not a str"):
        fedhm.run(tiny_bert(), [(LINES, LABELS)], None, settings(), tokenizer="bert")
    with pytest.raises(fedhm.FedhmError, match="has the columns 'picture', and none is called 'label'"):
        read(Rows({"picture": LINES}))
    with pytest.raises(fedhm.FedhmError, match="'position_ids', which is not handed on to the model: leave it out"):
        read(({"input_ids": [[1, 2]], "position_ids": [[1, 0]]}, [0]))


def test_a_tokenizer_of_a_much_smaller_model_is_warned_of(tokenizer: Any) -> None:
    larger = nn.Sequential()
    vars(larger)["get_input_embeddings"] = lambda: nn.Embedding(81, 2)  # more than twice the tokenizer's 40
    with pytest.warns(FedhmWarning, match="has 40 tokens and the model 81: it seems to be another model's"):
        check_tokenizer(tokenizer, larger)
    vars(larger)["get_input_embeddings"] = lambda: nn.Embedding(80, 2)  # others for round numbers
    check_tokenizer(tokenizer, larger)
