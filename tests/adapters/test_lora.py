"""LoRA adapters of every rank, on tiny transformers: what travels, what is merged, saved, resumed and refused."""

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhm
from fedhm.adapters.adapted import Adapting, Base
from fedhm.adapters.wire import FOLDED
from fedhm.config.plugins import find
from fedhm.methods.method import AnyMethod, Setup
from fedhm.networks.exchange import Tensors, exchanged, load
from fedhm.networks.inputs import scores
from fedhm.networks.structure import copied
from fedhm.server.record import Record
from fedhm.work.messages import Participant, Update
from tiny_transformers import needs_peft, sentences, tiny_bert, tiny_llama

pytestmark = [pytest.mark.slow, needs_peft]  # importing transformers takes seconds

RANKS = [4, 2, 1]
TRAIN = {"rounds": 2, "batch": 8, "lr": 0.02, "optimizer": "adamw"}
DATA = [sentences(18, seed) for seed in range(3)]
TEST = sentences(24, 99)


def settings(method: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    own = {"name": "lora", "ranks": RANKS} | (method or {})
    whole = {"participation": 1.0}
    return {"method": own, "train": TRAIN, "federation": whole, "engine": {"workers": 1, "threads": 1}} | sections


def batch() -> dict[str, Tensor]:
    ids = torch.randint(1, 40, (5, 7), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def output(network: nn.Module) -> Tensor:
    with torch.no_grad():
        return scores(network.eval(), batch())


def started(name: str, model: nn.Module | None = None, **own: Any) -> tuple[AnyMethod, Any, Tensors]:
    """Return a method around a model, its state before the first round, and the model's weights."""
    model = model or tiny_bert()
    method = find("methods", name).model_validate({"name": name, **own}).build(model, Setup("classifier", batch()))
    weights = {n: t.clone() for n, t in exchanged(model).items()}
    return method, method.start(weights), weights


def answers(method: AnyMethod, state: Any, clients: int, seed: int = 0) -> list[Update]:
    """Return updates as if clients had trained: what they were sent, and noise."""
    generator = torch.Generator().manual_seed(seed)
    asked = [Participant(number, method.levels[number % len(method.levels)]) for number in range(clients)]
    found = []
    for task in method.tasks(state, asked, 1):
        own = {n: t for n, t in task.tensors.items() if not n.startswith(FOLDED)}
        moved = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in own.items()}
        kept = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in task.kept.items()}
        found.append(Update(task.kind, 1, task.client, task.tier, task.network, moved, 10, None, 1.0, kept=kept))
    return found


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
    networks = [method.network(tier) for tier in method.tiers]
    held = [dict(network.named_parameters()) for network in [*networks, copied(networks[0])]]
    name = "base_model.model.bert.embeddings.word_embeddings.weight"
    assert len({parameters[name].data_ptr() for parameters in held}) == 1
    assert all(parameter.requires_grad for parameter in model.parameters())
    sent = exchanged(networks[1])
    layer = "bert.encoder.layer.0.attention.self.query"
    assert sent.keys() == method.weights(state, "1/2").keys()
    assert {part.rpartition(".")[2] for part in sent} == {"u", "v", "weight", "bias"}
    assert sent[f"{layer}.u"].shape == (2, 16)
    assert sum(t.numel() for t in sent.values()) < 0.1 * sum(p.numel() for p in model.parameters())


def test_what_an_adapter_does_does_not_depend_on_the_tier_that_sent_it() -> None:
    base = Base(tiny_bert(), Adapting(("query", "value"), 3.0, ("classifier",)))
    small, large = base.network(2), base.network(5)
    sent = {n: t.clone().normal_(generator=torch.Generator().manual_seed(1)) for n, t in exchanged(small).items()}
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
    base = Base(tiny_bert(), Adapting(("query", "value"), 2.0, ("classifier",)))
    gradients = []
    for rank in (2, 5):
        network = base.network(rank)
        factors = {
            n: t.clone().zero_() if n.endswith(".v") else torch.full_like(t, 0.1) for n, t in exchanged(network).items()
        }
        load(network, factors)
        torch.nn.functional.cross_entropy(scores(network, batch()), torch.tensor([0, 1, 2, 0, 1])).backward()
        name = f"base_model.model.{next(iter(base.shapes))}.lora_B.default.weight"
        gradients.append(dict(network.named_parameters())[name].grad)
    torch.testing.assert_close(gradients[0][:, :2], gradients[1][:, :2])


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


def test_hetlora_pads_with_zeros_weighs_by_norms_and_truncates() -> None:
    method, state, _ = started("hetlora", ranks=RANKS)
    updates = answers(method, state, 3)
    found = method.merge(state, updates, 1)
    layer = next(iter(method.base.shapes))
    norms = []
    for update in updates:
        products = [update.tensors[f"{each}.v"] @ update.tensors[f"{each}.u"] for each in method.base.shapes]
        norms.append(torch.stack(products).norm().item())
    padded = [torch.cat([u.tensors[f"{layer}.u"], torch.zeros(4 - len(u.tensors[f"{layer}.u"]), 16)]) for u in updates]
    expected = sum(norm * each for norm, each in zip(norms, padded, strict=True)) / sum(norms)
    torch.testing.assert_close(found.weights[f"{layer}.u"], expected)
    sent = method.weights(found, "1/4")
    assert torch.equal(sent[f"{layer}.u"], found.weights[f"{layer}.u"][:1])
    assert torch.equal(sent[f"{layer}.v"], found.weights[f"{layer}.v"][:, :1])


def test_flora_adds_the_stacked_adapters_to_the_base() -> None:
    method, state, weights = started("flora", ranks=RANKS, weighting="samples")
    updates = [replace(update, samples=5 * (number + 1)) for number, update in enumerate(answers(method, state, 3))]
    found = method.merge(state, updates, 1)
    layer = next(iter(method.base.shapes))
    stacked_b = torch.cat([u.samples / 30 * u.tensors[f"{layer}.v"] for u in updates], 1)
    stacked_a = torch.cat([u.tensors[f"{layer}.u"] for u in updates])
    torch.testing.assert_close(found.added[layer], stacked_b @ stacked_a)
    network = load(method.network("1/4"), method.weights(found, "1/4"))
    folded = dict(network.named_parameters())[f"base_model.model.{layer}.base_layer.weight"]
    torch.testing.assert_close(folded.data, weights[f"{layer}.weight"] + stacked_b @ stacked_a)
    with pytest.raises(fedhm.FedhmError, match="in the base itself"):
        fedhm.Result([], {"full": network}, {}).save_adapter("full", "out")


def test_ffa_lora_averages_b_alone_and_all_have_one_a() -> None:
    method, state, _ = started("ffalora", rank=2)
    assert not any(name.endswith(".u") for name in state.weights)
    updates = answers(method, state, 3)
    found = method.merge(state, updates, 1)
    layer = next(iter(method.base.shapes))
    networks = [load(method.network("r2"), u.tensors) for u in updates] + [load(method.network("r2"), found.weights)]
    products = [n.get_submodule(f"base_model.model.{layer}").get_delta_weight("default") for n in networks]
    torch.testing.assert_close(products[3], (products[0] + products[1] + products[2]) / 3)  # no cross terms
    trained = [name for name, p in networks[0].named_parameters() if p.requires_grad]
    assert trained
    assert not any("lora_A" in name for name in trained)


def test_fedsa_shares_a_and_clients_keep_their_b() -> None:
    run = fedhm.run(tiny_bert(), DATA, TEST, settings() | {"method": {"name": "fedsa", "rank": 2}})
    assert run.records[-1].traffic["r2"].answers == 3
    method, state, _ = started("fedsa", rank=2)
    updates = answers(method, state, 3)
    found = method.merge(state, updates, 1)
    layer = next(iter(method.base.shapes))
    torch.testing.assert_close(found.weights[f"{layer}.a"], sum(u.tensors[f"{layer}.a"] for u in updates) / 3)
    tasks = list(method.tasks(found, [Participant(1, "r2"), Participant(7, "r2")], 2))
    assert torch.equal(tasks[0].kept[f"{layer}.b"], updates[1].kept[f"{layer}.b"])
    assert not tasks[1].kept[f"{layer}.b"].any()


def test_with_one_client_at_one_rank_all_methods_are_plain_lora() -> None:
    found = []
    for name, own in (
        ("homolora", {"rank": 3}),
        ("lora", {"ranks": [3], "aggregate": "models"}),
        ("lora", {"ranks": [3], "aggregate": "updates"}),
        ("lora", {"ranks": [3], "aggregate": "bands"}),
        ("hetlora", {"ranks": [3]}),
    ):
        method, state, _ = started(name, **own)
        merged = method.merge(state, answers(method, state, 1), 1)
        found.append(output(load(method.network(method.tiers[0]), method.weights(merged, method.tiers[0]))))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["flora", "lora"])
def test_folding_with_one_client_is_plain_lora(name: str) -> None:
    own: dict[str, Any] = {"ranks": [3]} | ({"fold": True, "fold_rank": 6} if name == "lora" else {})
    method, state, _ = started(name, **own)
    (update,) = answers(method, state, 1)
    merged = method.merge(state, [update], 1)
    plain, before, _ = started("homolora", rank=3)
    expected = output(load(plain.network("r3"), update.tensors))
    torch.testing.assert_close(
        output(load(method.network("full"), method.weights(merged, "full"))), expected, rtol=1e-4, atol=1e-5
    )
    (task,) = method.tasks(merged, [Participant(0, "full")], 2)
    trained = load(method.network(task.network), task.tensors)  # the adapter begins at zero on top of the whole
    torch.testing.assert_close(output(trained), expected, rtol=1e-4, atol=1e-5)
    assert before.weights.keys() == update.tensors.keys()


def test_a_language_model_is_tuned_without_a_new_head() -> None:
    clients = [({"input_ids": sentences(12, seed, vocabulary=30)[0]["input_ids"]}, None) for seed in range(2)]
    asked = settings({"ranks": [2, 1], "target": ["q_proj", "v_proj"]}, objective="causal_lm")
    run = fedhm.run(tiny_llama(), clients, clients[0], asked)
    assert 1 < run.metrics["1/2"].perplexity < 40
    assert not any("lm_head" in name for name in exchanged(run.networks["full"]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"target": ["nothing"]}, r"method.target = \['nothing'\] cannot be adapted .* called .*query"),
        ({"ranks": [40, 2]}, "rank 40 is above what .* 16 → 16, can have: choose at most 16"),
        ({"head": ["score"]}, "the model has no module 'score'"),
        ({"target": ["word_embeddings"]}, "a Embedding: adapters are for linear layers"),
    ],
)
def test_what_cannot_be_adapted_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fedhm.FedhmError, match=sentence):
        fedhm.run(tiny_bert(), DATA, TEST, settings(change))


def test_a_tokenizer_of_another_model_and_too_long_texts_are_one_sentence() -> None:
    long = ({"input_ids": [[1] * 20, [2] * 3, [3] * 3]}, [0, 1, 2])
    for data, sentence in (
        (({"input_ids": [[1, 77], [2], [3]]}, [0, 1, 2]), "a token 77, but the model knows 40"),
        (long, "a text has 20 tokens, but the model reads at most 16"),
    ):
        with pytest.raises(fedhm.FedhmError, match=sentence):
            fedhm.run(tiny_bert(), [data, data], data, settings())


@pytest.mark.usefixtures("without_figures")
def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    asked = settings(train={**TRAIN, "rounds": 1})
    fedhm.run(tiny_bert(), DATA, TEST, asked, tmp_path / "run")
    with pytest.raises(fedhm.FedhmError):
        fedhm.run(tiny_bert(seed=1), DATA, TEST, asked, tmp_path / "run")
    with pytest.raises(fedhm.FedhmError, match="does not fit"):
        fedhm.load_tier(tmp_path / "run" / "models" / "full.safetensors", tiny_bert(classes=5))


def test_without_peft_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(fedhm.FedhmError, match=r"pip install 'fedhm\[lora\]'"):
        fedhm.run(tiny_bert(), DATA, TEST, settings())


def test_hostile_adapters_are_bounded_by_what_others_do() -> None:
    method, state, _ = started("lora", ranks=[2])
    layer = next(iter(method.base.shapes))
    poison: Callable[[Tensor], Tensor] = lambda t: t + 1e4  # noqa: E731
    honest = answers(method, state, 4)
    assert all(update.tensors[f"{layer}.v"].abs().max() < 10 for update in honest)
    asked = settings(train={**TRAIN, "rounds": 1, "on_bad_update": "drop"})
    from fedhm.config.reading import parse
    from fedhm.data.federation import gathered

    federation = gathered(DATA, TEST)
    config = parse({**asked, "federation": {"clients": 3, "participation": 1.0}}, "test")
    experiment = fedhm.assemble(tiny_bert(), federation, config)
    plain = experiment.engine.run

    def hostile(tasks: Any) -> Any:
        for reply in plain(tasks):
            bad = isinstance(reply, Update) and reply.client == 0
            yield replace(reply, tensors={n: poison(t) for n, t in reply.tensors.items()}) if bad else reply

    experiment.engine.run = hostile  # type: ignore[method-assign]
    record = experiment.run().records[-1]
    assert [entry["client"] for entry in record.dropped] == [0]
    assert "its change has norm" in record.dropped[0]["reason"]


def test_importing_the_library_and_reading_settings_imports_no_transformers() -> None:
    code = (
        "import sys, fedhm; fedhm.load_config('clinc150-lora'); "
        "sys.exit(bool({'peft', 'transformers', 'datasets'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
