"""Transformers of Hugging Face, factorized: what stays dense and why, and that the rest is still the model."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedhm
from fedhm.errors import FedhmError
from fedhm.lowrank.decay import add_frobenius_decay, low_rank_layers
from fedhm.lowrank.hadamard import HadamardTransposed
from fedhm.lowrank.hybrid import to_full, to_hadamard, to_hybrid
from fedhm.lowrank.layers import LowRankTransposed, largest_rank
from fedhm.lowrank.plan import RankPlan, plan_ranks
from fedhm.measure.cost import measure
from fedhm.networks.inputs import Inputs, forward_batch
from tiny_transformers import tiny_bert, tiny_gpt2, tiny_llama, tiny_masked_bert, tiny_vit

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # importing transformers takes seconds

TIED = "its weight is tied to another layer's"
MODELS = {
    "bert": tiny_bert,
    "masked": tiny_masked_bert,
    "llama": tiny_llama,
    "gpt2": tiny_gpt2,
    "vit": partial(tiny_vit, 3),
}
BERT_BLOCK = [
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "intermediate.dense", "output.dense",
]  # fmt: skip
LLAMA_BLOCK = [f"self_attn.{letter}_proj" for letter in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
# the layers that are factorized, and all others with their reasons; the embedding counts as no layer to keep
PLANS = {
    "bert": (
        [*(f"bert.encoder.layer.{n}.{layer}" for n in (0, 1) for layer in BERT_BLOCK), "bert.pooler.dense"]
        + [f"bert.embeddings.{kind}_embeddings" for kind in ("word", "position", "token_type")],
        {"classifier": "the classifier"},
    ),
    "masked": (
        [*(f"bert.encoder.layer.0.{layer}" for layer in BERT_BLOCK), "cls.predictions.transform.dense"]
        + [f"bert.embeddings.{kind}_embeddings" for kind in ("position", "token_type")],
        {"bert.embeddings.word_embeddings": TIED, "cls.predictions.decoder": f"the classifier, and {TIED}"},
    ),
    "llama": (
        ["model.embed_tokens", *(f"model.layers.0.{layer}" for layer in LLAMA_BLOCK)],
        {"lm_head": "the classifier"},
    ),
    "gpt2": (
        [f"transformer.h.0.{layer}" for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
        + ["transformer.wpe"],
        {"transformer.wte": TIED, "lm_head": f"the classifier, and {TIED}"},
    ),
    "vit": (
        [f"vit.layers.{n}.attention.{letter}_proj" for n in (0, 1) for letter in "qkvo"]
        + [f"vit.layers.{n}.mlp.fc{m}" for n in (0, 1) for m in (1, 2)],
        {
            "vit.embeddings": "a ViTEmbeddings, a type of layer that is not factorized",
            "vit.embeddings.patch_embeddings.projection": "asked for",
            "classifier": "the classifier",
        },
    ),
}


def batch(name: str) -> Inputs:
    generator = torch.Generator().manual_seed(3)
    if name == "vit":
        return torch.rand(3, 1, 8, 8, generator=generator)
    ids = torch.randint(1, 30, (3, 7), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(7) < torch.tensor([[7], [5], [3]])).long()}


def planned(name: str, model: nn.Module, ratio: float = 1 / 4) -> RankPlan:
    patches = ["vit.embeddings.patch_embeddings.projection"] if name == "vit" else []
    return plan_ranks(model, ratio, keep=0, dense=patches)


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def model(name: str) -> nn.Module:
    found: nn.Module = MODELS[name]()  # type: ignore[operator]
    return found.eval()


@pytest.fixture
def run(name: str) -> Callable[[nn.Module], Tensor]:
    inputs = batch(name)
    return lambda network: forward_batch(network, inputs)


def test_attention_and_mlp_are_factorized_and_the_rest_has_a_reason(name: str, model: nn.Module) -> None:
    plan = planned(name, model)
    factorized, dense = PLANS[name]
    assert sorted(plan) == sorted(factorized)
    assert plan.dense == dense
    assert set(plan.values()) - {1} == {4}  # a quarter of 16, the smaller side of all but the two token types
    assert all("rank 8 would hold" in planned(name, model, 1 / 2).decisions[n] for n in plan if _is_square(model, n))


def _is_square(model: nn.Module, name: str) -> bool:
    return model.get_parameter(f"{name}.weight").shape == (16, 16)


def test_at_full_rank_outputs_are_the_models_own(name: str, model: nn.Module, run: Callable) -> None:
    ranks = {n: largest_rank(model.get_parameter(f"{n}.weight").shape) for n in planned(name, model)}
    torch.testing.assert_close(run(to_hybrid(model, ranks)), run(model), rtol=1e-4, atol=1e-5)
    assert planned(name, model, 1) == {}
    assert torch.equal(run(to_hybrid(model, planned(name, model, 1))), run(model))


def test_the_recovered_state_is_loaded_by_the_original_model(name: str, model: nn.Module, run: Callable) -> None:
    hybrid = to_hybrid(model, planned(name, model))
    shortened = run(hybrid)
    assert (shortened - run(model)).abs().max() > 1e-4
    assert measure(hybrid, batch_of_one(name)).parameters < measure(model, batch_of_one(name)).parameters
    assert measure(hybrid, batch_of_one(name)).macs < measure(model, batch_of_one(name)).macs
    model.load_state_dict(to_full(hybrid), strict=True)
    torch.testing.assert_close(run(model), shortened, rtol=1e-4, atol=1e-5)


def batch_of_one(name: str) -> tuple[int, ...] | dict[str, Tensor]:
    inputs = batch(name)
    return {n: t[:1] for n, t in inputs.items()} if isinstance(inputs, dict) else tuple(inputs.shape[1:])


def test_tied_heads_stay_tied() -> None:
    for model, head in ((tiny_gpt2(), "lm_head"), (tiny_masked_bert(), "cls.predictions.decoder")):
        hybrid = to_hybrid(model, plan_ranks(model, 1 / 4, keep=0))
        assert hybrid.get_submodule(head).weight is hybrid.get_input_embeddings().weight  # type: ignore[operator]
        assert plan_ranks(model, 1 / 4, classifier=None).dense[head] == "its weight is tied to another layer's"
        with pytest.raises(FedhmError, match=f"factorizes '{head}', but it must stay dense: its weight is tied"):
            to_hybrid(model, {head: 2})


@pytest.mark.parametrize(("inputs", "outputs"), [(6, 18), (18, 6)])
def test_a_transposed_linear_layer(inputs: int, outputs: int) -> None:
    from transformers.pytorch_utils import Conv1D

    dense = Conv1D(outputs, inputs).double()
    layer = LowRankTransposed(dense, 4)
    assert layer.weight.shape == dense.weight.shape == (inputs, outputs)
    x = torch.randn(2, 3, inputs, dtype=torch.float64)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight.T, dense.bias), rtol=0, atol=1e-12)
    spectrum = torch.linalg.svdvals(dense.weight.detach())
    error = (layer.weight - dense.weight).norm().item()
    assert error == pytest.approx(float(spectrum[4:].norm()), rel=1e-12)
    assert layer.u.numel() + layer.v.numel() == 4 * (inputs + outputs)
    torch.testing.assert_close(LowRankTransposed(dense, 6)(x), dense(x), rtol=0, atol=1e-12)
    assert repr(layer) == f"LowRankTransposed(in_features={inputs}, out_features={outputs}, rank=4, bias=True)"


def test_decay_and_hadamard_factors_of_a_transposed_linear_layer() -> None:
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(9, 5)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    hybrid = to_hybrid(model, {"0": 3})
    hybrid(x).sum().backward()
    layer = hybrid[0]
    norm = 0.3 / 2 * layer.weight.square().sum()
    expected = [
        p.grad + g for p, g in zip((layer.u, layer.v), torch.autograd.grad(norm, [layer.u, layer.v]), strict=True)
    ]
    add_frobenius_decay(low_rank_layers(hybrid), 0.3)
    torch.testing.assert_close([layer.u.grad, layer.v.grad], expected, rtol=0, atol=1e-12)

    composed = to_hadamard(model, {"0": 2}, torch.Generator().manual_seed(0))
    assert isinstance(composed[0], HadamardTransposed)
    model.load_state_dict(to_full(composed), strict=True)
    torch.testing.assert_close(model(x), composed(x), rtol=0, atol=1e-12)


def test_the_example_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "factorized.md").read_text()
    first, *_ = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {"fedhm": fedhm, "model": tiny_bert()}
    exec(compile(first, "docs/factorized.md", "exec"), names)
    assert "rank 4" in capsys.readouterr().out
    recovered = to_full(names["small"])
    assert all(torch.equal(tensor, recovered[name]) for name, tensor in names["model"].state_dict().items())


def test_nobody_imports_transformers_for_a_model_without_them() -> None:
    code = """
import sys, torch, fedhm
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Embedding(4, 4))
fedhm.to_hybrid(model, fedhm.plan_ranks(model, 1 / 4, keep=0))
print("transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
