"""Which layers get adapters: those that are named, or all linear ones; and how fast their bands are learnt."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fedhm
from fedhm.config.loading import load_config
from made_adapters import DATA, TEST, TRAIN, answers, output, settings, started
from tiny_transformers import needs_peft, tiny_bert, tiny_distilbert, tiny_gpt2

pytestmark = [pytest.mark.slow, needs_peft]
LAYERS = {"query", "key", "value", "dense"}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (tiny_bert, LAYERS),
        (tiny_distilbert, {"q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"}),
        (tiny_gpt2, {"c_attn", "c_proj", "c_fc"}),
    ],
)
def test_all_linear_layers_but_the_head_and_the_output(model: Any, expected: set[str]) -> None:
    head = [] if model is tiny_gpt2 else "auto"
    method, _, _ = started("lora", model(), ranks=[2], target="all-linear", head=head)
    assert {layer.rpartition(".")[2] for layer in method.base.shapes} == expected


@pytest.mark.usefixtures("without_figures")
def test_a_tier_with_adapters_in_all_linear_layers_is_loaded(tmp_path: Path) -> None:
    asked = settings({"ranks": [2], "target": "all-linear"}, train={**TRAIN, "rounds": 1})
    result = fedhm.run(tiny_bert(), DATA, TEST, asked, tmp_path / "run")
    loaded = fedhm.load_tier(tmp_path / "run" / "models" / "full.safetensors", tiny_bert())
    torch.testing.assert_close(output(loaded), output(result.networks["full"]))


@pytest.mark.parametrize("given", ["[q_proj,v_proj]", "['q_proj', 'v_proj']", '["q_proj","v_proj"]'])
def test_names_whose_quotes_a_shell_took_away_are_a_list(given: str) -> None:
    assert load_config("clinc150-lora", [f"method.target={given}"]).method.target == ("q_proj", "v_proj")


def test_one_name_is_a_list_of_one() -> None:
    assert load_config("clinc150-lora", ["method.target=query"]).method.target == ("query",)


def test_bands_are_as_fast_as_the_settings_say() -> None:
    found = {}
    for own in ({}, {"band_speed": 1.0}, {"band_speed": 0.0}, {"band_speed": 0.5}, {"aggregate": "updates"}):
        method, state, _ = started("lora", ranks=[4, 2], **own)
        after = method.merge(state, answers(method, state, 4), 1)
        layer = next(iter(after.factors))
        found[str(own)] = after.factors[layer].left @ after.factors[layer].right
    default, fast, slow, half, updates = found.values()
    assert torch.equal(default, fast)
    torch.testing.assert_close(slow, updates)
    assert not torch.allclose(half, fast)
    assert not torch.allclose(half, slow)
