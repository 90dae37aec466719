"""LoRA adapters of every rank, on tiny transformers: what travels, what is merged, saved and resumed."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedhm
from fedhm.adapters.adapted import AdapterSettings, FrozenBase
from fedhm.config.schema import TrainConfig
from fedhm.networks.exchange import exchanged_tensors, load
from fedhm.networks.inputs import forward_batch
from fedhm.networks.structure import copy_network
from fedhm.server.record import Record
from fedhm.work.train import local_optimizer
from made_adapters import DATA, RANKS, TEST, TRAIN, batch, output, settings, started
from tiny_transformers import needs_peft, sentences, tiny_bert, tiny_llama

pytestmark = [pytest.mark.slow, needs_peft]  # importing transformers takes seconds


@pytest.fixture(scope="module")
def result() -> fedhm.Result:
    return fedhm.run(tiny_bert(), DATA, TEST, settings(train={**TRAIN, "rounds": 5, "epochs": 6, "lr": 0.03}))


def test_every_rank_learns_and_its_adapter_is_loaded_by_peft(result: fedhm.Result, tmp_path: Path) -> None:
    from peft import PeftModel

    assert list(result.metrics) == ["full", "1/2", "1/4"]
    assert result.records[-1].traffic["full"].loss < 0.9 * result.records[0].traffic["full"].loss
    for tier in result.metrics:
        result.save_adapter(tier, tmp_path / tier)
        loaded = PeftModel.from_pretrained(tiny_bert(), tmp_path / tier)
        torch.testing.assert_close(output(loaded), output(result.networks[tier]))
    with pytest.raises(fedhm.FedhmError, match="there is no tier '1/8', known are full"):
        result.save_adapter("1/8", tmp_path)


def test_adapters_and_the_head_travel_and_the_base_is_one_in_a_process() -> None:
    model = tiny_bert()
    method, state, _ = started("lora", model, ranks=RANKS)
    networks = [method.network(method.spec(tier)) for tier in method.tiers]
    held = [dict(network.named_parameters()) for network in [*networks, copy_network(networks[0])]]
    name = "base_model.model.bert.embeddings.word_embeddings.weight"
    assert len({parameters[name].data_ptr() for parameters in held}) == 1
    assert all(parameter.requires_grad for parameter in model.parameters())
    sent = exchanged_tensors(networks[1])
    layer = "bert.encoder.layer.0.attention.self.query"
    assert sent.keys() == method.weights(state, "1/2").keys()
    assert {part.rpartition(".")[2] for part in sent} == {"u", "v", "weight", "bias"}
    assert sent[f"{layer}.u"].shape == (2, 16)
    assert sum(t.numel() for t in sent.values()) < 0.1 * sum(p.numel() for p in model.parameters())


def test_what_an_adapter_does_does_not_depend_on_the_tier_that_sent_it() -> None:
    base = FrozenBase(tiny_bert(), AdapterSettings(("query", "value"), 3.0, ("classifier",)))
    small, large = base.network(2), base.network(5)
    sent = {
        n: t.clone().normal_(generator=torch.Generator().manual_seed(1)) for n, t in exchanged_tensors(small).items()
    }
    generator = torch.Generator().manual_seed(2)
    wider = dict(sent)
    for layer in base.shapes:  # three directions more that are not learnt yet, as they begin: B is 0
        more = torch.randn(3, 16, generator=generator)
        wider[f"{layer}.u"] = torch.cat([sent[f"{layer}.u"], more])
        wider[f"{layer}.v"] = torch.cat([sent[f"{layer}.v"], torch.zeros(16, 3)], 1)
    load(small, sent), load(large, wider)
    torch.testing.assert_close(output(small), output(large))
    weight = dict(base._model.named_parameters())
    layer = next(iter(base.shapes))
    merged = copy.deepcopy(small).merge_and_unload()  # peft's own: W + α/r · B A
    expected = weight[f"{layer}.weight"] + sent[f"{layer}.v"] @ sent[f"{layer}.u"]
    torch.testing.assert_close(merged.get_submodule(layer).weight.data, expected)


def test_a_step_changes_directions_by_the_same_at_every_rank() -> None:
    base = FrozenBase(tiny_bert(), AdapterSettings(("query", "value"), 2.0, ("classifier",)))
    gradients = []
    for rank in (2, 5):
        network = base.network(rank)
        factors = {
            n: t.clone().zero_() if n.endswith(".v") else torch.full_like(t, 0.1)
            for n, t in exchanged_tensors(network).items()
        }
        load(network, factors)
        torch.nn.functional.cross_entropy(forward_batch(network, batch()), torch.tensor([0, 1, 2, 0, 1])).backward()
        name = f"base_model.model.{next(iter(base.shapes))}.lora_B.default.weight"
        gradients.append(dict(network.named_parameters())[name].grad)
    torch.testing.assert_close(gradients[0][:, :2], gradients[1][:, :2])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_head_may_learn_faster_than_the_adapters(optimizer: str) -> None:
    network = started("lora", ranks=RANKS)[0].network(started("lora", ranks=RANKS)[0].spec("full"))
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    for parameter in trained.values():
        parameter.grad = torch.ones_like(parameter)
    train = TrainConfig(optimizer=optimizer, head_factor=10.0, weight_decay=0.0, frobenius_decay=0.0)
    local_optimizer(network, train, 0.01).step()
    for name, parameter in trained.items():
        expected = 0.1 if "classifier" in name else 0.01
        torch.testing.assert_close(before[name] - parameter, torch.full_like(parameter, expected), rtol=1e-3, atol=1e-5)


class Interrupted(Exception):  # noqa: N818
    pass


class StopAfter:
    def __init__(self, last: int) -> None:
        self.last = last

    def started(self, done: int, rounds: int) -> None: ...

    def task_done(self, *_: object) -> None: ...

    def round_done(self, record: Record) -> None:
        if record.round == self.last:
            raise Interrupted


@pytest.mark.parametrize("own", [{}, {"fold": True, "fold_rank": 8}, {"name": "flora"}], ids=["lora", "fold", "flora"])
@pytest.mark.usefixtures("without_figures")
def test_an_interrupted_run_ends_bit_for_bit_and_its_tiers_are_loaded(own: dict[str, Any], tmp_path: Path) -> None:
    asked = settings(own)
    whole = fedhm.run(tiny_bert(), DATA, TEST, asked, tmp_path / "whole")
    with pytest.raises(Interrupted):
        fedhm.run(tiny_bert(), DATA, TEST, asked, tmp_path / "again", watchers=[StopAfter(1)])
    again = fedhm.run(tiny_bert(), DATA, TEST, asked, tmp_path / "again")
    for tier, network in whole.networks.items():
        assert torch.equal(output(network), output(again.networks[tier]))
    file = tmp_path / "again" / "models" / "1-4.safetensors"
    torch.testing.assert_close(output(fedhm.load_tier(file, tiny_bert())), output(whole.networks["1/4"]))
    assert file.stat().st_size < 40_000


def test_workers_give_the_same_bits() -> None:
    runs = [
        fedhm.run(tiny_bert(), DATA, TEST, settings(engine={"workers": workers, "threads": 1})) for workers in (1, 2)
    ]
    assert runs[0].records[-1].metrics == runs[1].records[-1].metrics
    assert torch.equal(output(runs[0].networks["full"]), output(runs[1].networks["full"]))


def test_a_language_model_is_tuned_without_a_new_head() -> None:
    clients = [({"input_ids": sentences(12, seed, vocabulary=30)[0]["input_ids"]}, None) for seed in range(2)]
    asked = settings({"ranks": [2, 1], "target": ["q_proj", "v_proj"]}, objective="causal_lm")
    run = fedhm.run(tiny_llama(), clients, clients[0], asked)
    assert 1 < run.metrics["1/2"].perplexity < 40
    assert not any("lm_head" in name for name in exchanged_tensors(run.networks["full"]))


def test_importing_the_library_and_reading_settings_imports_no_transformers() -> None:
    code = (
        "import sys, fedhm; fedhm.load_config('clinc150-lora'); "
        "sys.exit(bool({'peft', 'transformers', 'datasets'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
