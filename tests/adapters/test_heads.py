"""Heads of one layer and of several: all that is new is trained, averaged and saved; nothing is trained and dropped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedhm
from fedhm.adapters.adapted import find_head
from fedhm.methods.adapting import check_travelling
from fedhm.networks.exchange import exchanged_tensors, load
from made_adapters import DATA, TEST, TRAIN, answers, output, settings, started
from tiny_transformers import needs_peft, tiny_bert, tiny_distilbert, tiny_gpt2, tiny_gpt2_classifier, tiny_roberta

pytestmark = [pytest.mark.slow, needs_peft]  # importing transformers takes seconds
DISTILBERT = {"target": ["q_lin", "v_lin"]}


@pytest.mark.parametrize(
    ("model", "classifier", "head"),
    [
        (tiny_bert, "classifier", ("classifier",)),
        (tiny_roberta, "classifier.out_proj", ("classifier",)),
        (tiny_distilbert, "classifier", ("pre_classifier", "classifier")),
        (tiny_gpt2_classifier, None, ("score",)),
    ],
)
def test_a_head_is_all_that_was_made_for_the_task(model: Any, classifier: str | None, head: tuple[str, ...]) -> None:
    assert find_head(model(), "auto", classifier, per_token=False) == head


def test_of_a_model_that_is_not_of_transformers_it_is_the_layer_that_gives_the_outputs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    assert find_head(model, "auto", "1", per_token=False) == ("1",)


@pytest.mark.parametrize("name", ["lora", "hetlora", "flora", "homolora", "ffalora", "fedsa"])
@pytest.mark.parametrize(
    ("model", "own", "head"),
    [
        (tiny_roberta, {}, {"classifier.dense", "classifier.out_proj"}),
        (tiny_roberta, {"head": ["classifier"]}, {"classifier.dense", "classifier.out_proj"}),
        (tiny_distilbert, DISTILBERT, {"pre_classifier", "classifier"}),
        (tiny_distilbert, DISTILBERT | {"head": ["classifier"]}, {"pre_classifier", "classifier"}),  # as peft has it
    ],
)
def test_every_layer_of_a_head_travels_and_is_merged(
    name: str, model: Any, own: dict[str, Any], head: set[str]
) -> None:
    method, state, weights = started(name, model(), **own)
    tier = method.tiers[0]
    check_travelling(frozenset(exchanged_tensors(method.network(method.spec(tier)))), method.weights(state, tier), tier)
    after = method.weights(method.merge(state, answers(method, state, 3), 1), tier)
    network = load(method.network(method.spec(tier)), after)
    held = exchanged_tensors(network)
    for layer in head:
        assert not torch.equal(after[f"{layer}.weight"], weights[f"{layer}.weight"])
        assert torch.equal(held[f"{layer}.weight"], after[f"{layer}.weight"])


@pytest.mark.parametrize(("model", "own"), [(tiny_roberta, {}), (tiny_distilbert, DISTILBERT)])
def test_an_adapter_with_a_head_of_several_layers_is_loaded_by_peft(
    model: Any, own: dict[str, Any], tmp_path: Path
) -> None:
    from peft import PeftModel

    asked = settings({"ranks": [2], **own}, train={**TRAIN, "rounds": 1})
    first = model()
    result = fedhm.run(first, DATA, TEST, asked)
    result.save_adapter("full", tmp_path)
    fresh = model(seed=5)  # with another head, as from_pretrained draws one
    fresh.base_model.load_state_dict(first.base_model.state_dict())
    torch.testing.assert_close(output(PeftModel.from_pretrained(fresh, tmp_path)), output(result.networks["full"]))


def test_a_head_that_is_tied_to_the_embeddings_is_refused() -> None:
    with pytest.raises(fedhm.FedhmError, match=r"'lm_head\.weight' is tied to 'transformer\.wte\.weight', which stays"):
        started("lora", tiny_gpt2(), ranks=[2], target=["c_attn"], head=["lm_head"])


def test_a_module_inside_of_another_is_refused() -> None:
    with pytest.raises(
        fedhm.FedhmError, match=r"'classifier\.dense', which is inside 'classifier': name one of the two"
    ):
        started("lora", tiny_roberta(), ranks=[2], head=["classifier", "classifier.dense"])


def test_a_state_that_lacks_what_clients_train_is_refused() -> None:
    method, state, _ = started("lora", tiny_roberta(), ranks=[2])
    weights = method.weights(state, "full")
    del weights["classifier.dense.weight"]
    with pytest.raises(fedhm.FedhmError, match=r"'classifier\.dense\.weight', of which the server has no value"):
        check_travelling(frozenset(exchanged_tensors(method.network(method.spec("full")))), weights, "full")
