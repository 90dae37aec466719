"""Pretrained transformers: by the mean of their tokens, without dropout, and only from safetensors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from fedhm.data.text import text_limits
from fedhm.errors import FedhmError
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


class Hostile:
    """A pickle that leaves a file behind when it is read."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._trace,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_a_model_in_a_pickle_is_refused_with_the_way_to_convert_it(name: str, folder: str, tmp_path: Path) -> None:
    shutil.copy(Path(folder) / "config.json", tmp_path)
    torch.save({"weight": Hostile(tmp_path / "trace")}, tmp_path / name)
    with pytest.raises(FedhmError, match=rf"only in {name}, a pickle.* write model\.safetensors .* save_pretrained"):
        read_pretrained(str(tmp_path), 3, False, 0)
    assert not (tmp_path / "trace").exists()


def test_a_pickle_beside_other_safetensors_is_not_read(folder: str, tmp_path: Path) -> None:
    shutil.copy(Path(folder) / "config.json", tmp_path)
    shutil.copy(Path(folder) / "model.safetensors", tmp_path / "other.safetensors")
    torch.save(read_pretrained(folder, 3, False, 0).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(FedhmError, match=r"cannot be read from .*model\.safetensors"):
        read_pretrained(str(tmp_path), 3, False, 0)


def test_a_converted_pickle_is_read(folder: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    shutil.copy(Path(folder) / "config.json", tmp_path)
    torch.save(read_pretrained(folder, 3, False, 0).state_dict(), tmp_path / "pytorch_model.bin")
    AutoModelForSequenceClassification.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert isinstance(read_pretrained(str(tmp_path), 3, False, 0), nn.Module)


def test_code_in_a_models_folder_is_neither_run_nor_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    names = {"AutoConfig": "own.Own", "AutoModelForSequenceClassification": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')")
    with pytest.raises(FedhmError, match="cannot be read from"):
        read_pretrained(str(tmp_path), 3, False, 0)
    assert not asked
    assert not (tmp_path / "trace").exists()
