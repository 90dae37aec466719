"""Runs from a config on text in files: read, resumed after kill -9, on Flower, and told by `fedhm sizes`."""

import csv
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import fedhm
import forked
from fedhm.cli import main
from fedhm.config.loading import load_config
from fedhm.data.text import read_text_files
from fedhm.data.tokens import Tokens
from fedhm.errors import FedhmError
from fedhm.machine.pretrained import find_pretrained
from run_outcome import weights
from tiny_transformers import needs_peft, tiny_bert

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_peft]
WORDS = ["card", "lost", "pay", "rent", "rain", "sun", "my", "the", "is", "of"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny pretrained model, its tokenizer, and texts to train and to test on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("text")
    tiny_bert().save_pretrained(folder / "base")
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder / "base")
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", 48), ("test", 12)):
        with (folder / f"intents-{name}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "category"])
            for number in range(count):
                label = number % 3
                extra = torch.randint(6, 10, (int(torch.randint(1, 6, (), generator=generator)),), generator=generator)
                rows.writerow([" ".join([WORDS[2 * label], *(WORDS[n] for n in extra)]), f"intent {label}"])
    return folder


def changes(place: Path, *more: str) -> list[str]:
    return [
        "data.source=text:intents", f"data.folder={place}", f"model.base={place}/base", "federation.clients=4",
        "data.train_samples=0", "method.ranks=[4, 2]", "train.rounds=2", "train.batch=4", "evaluation.every=1", *more,
    ]  # fmt: skip


def run(place: Path, out: Path, *more: str) -> None:
    main(["run", "clinc150-lora", "--set", *changes(place, *more), "--out", str(out)])


def models(folder: Path) -> dict[str, dict[str, bytes]]:
    return {file.name: weights(file) for file in (folder / "models").iterdir()}


@pytest.fixture(scope="module")
def finished(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    run(place, out)
    return out


def test_text_is_read_by_the_models_tokenizer(place: Path) -> None:
    source = read_text_files("intents", place, str(place / "base"), 4, per_token=False)
    assert source.classes == 3
    assert source.train.labels.tolist() == [0, 1, 2] * 16
    tokens = source.train.inputs
    assert isinstance(tokens, Tokens)
    assert int(tokens.lengths.max()) == 4  # what is longer is cut
    first = tokens.padded(torch.arange(3), 4)["input_ids"][:, 0]
    assert first.tolist() == [2 + WORDS.index(word) for word in ("card", "pay", "rain")]


@pytest.mark.usefixtures("without_figures")
def test_an_adapter_on_the_mean_of_tokens_is_loaded_by_peft(place: Path, finished: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModel, AutoTokenizer

    result = fedhm.resume(finished)
    result.save_adapter("1/2", tmp_path / "out")
    encoder = AutoModel.from_pretrained(place / "base")
    model = PeftModel.from_pretrained(fedhm.models.MeanPooled(encoder, outputs=3), tmp_path / "out").eval()
    read = AutoTokenizer.from_pretrained(place / "base")(["my card", "pay the rent"], padding=True, return_tensors="pt")
    inputs = {name: read[name] for name in ("input_ids", "attention_mask")}
    torch.testing.assert_close(model(**inputs), result.networks["1/2"].eval()(**inputs))
    factors = [p for name, p in model.named_parameters() if ".lora_B." in name]
    assert factors
    assert all(bool(factor.any()) for factor in factors)


def test_flower_ends_in_the_same_bits(place: Path, finished: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "flower", "engine.name=flower")
    assert models(tmp_path / "flower") == models(finished)


def test_a_run_that_was_killed_is_resumed_bit_for_bit(place: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    command = ["run", "clinc150-lora", "--set", *changes(place), "--out", str(out)]
    started = forked.fedhm(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 300
    while not list(out.glob("checkpoints/*.safetensors")) and time.monotonic() < end and started.poll() is None:
        time.sleep(0.005)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert list(out.glob("checkpoints/*.safetensors"))
    main(["resume", str(out)])
    assert models(out) == models(finished)


def test_sizes_have_the_base_apart(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["sizes", "clinc150-lora", "--set", *changes(place)])
    shown = re.sub(r"[^\w/.,:-]+", " ", capsys.readouterr().out)  # without the table's lines
    assert "tier rank parameters" in shown
    assert re.search(r"full 4 [\d,]+ .* 1/2 2 [\d,]+ ", shown)
    numbers = re.search(r"a frozen base of ([\d,]+) parameters, [\d.]+ kB, not sent", shown)
    assert numbers
    assert int(numbers[1].replace(",", "")) >= sum(p.numel() for p in tiny_bert().bert.embeddings.parameters())


def test_what_is_wrong_with_files_is_one_sentence(place: Path, tmp_path: Path) -> None:
    with pytest.raises(FedhmError, match=r"needs one file nothing\*train\* .* there is none"):
        read_text_files("nothing", place, str(place / "base"), 8, per_token=False)
    with pytest.raises(FedhmError, match=r"name one by model\.base"):
        read_text_files("intents", place, "", 8, per_token=False)
    with pytest.raises(FedhmError, match=r"neither a folder with a config\.json nor an installed package"):
        find_pretrained("no-such-package")
    with pytest.raises(FedhmError, match=r"is a folder without a config\.json"):
        find_pretrained(str(tmp_path))
    (tmp_path / "x-train.csv").write_text("a,b\n1,2\n")
    (tmp_path / "x-test.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FedhmError, match="must have a column text or sentence or utterance"):
        read_text_files("x", tmp_path, str(place / "base"), 8, per_token=False)
    with pytest.raises(FedhmError, match="belong together"):
        load_config("digits", ["model.name=transformer"])
