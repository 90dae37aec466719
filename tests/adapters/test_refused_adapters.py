"""What is wrong with adapters, their base or their text is one sentence; hostile ones come through the same door."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedhm
from fedhm.adapters.adapted import base_digest, save_adapter
from fedhm.config.loading import parse
from fedhm.data.federation import from_arrays
from fedhm.work.messages import Failure, Participant, Update
from made_adapters import DATA, RANKS, TEST, TRAIN, answers, settings, started
from tiny_transformers import needs_peft, tiny_bert, tiny_llama

pytestmark = [pytest.mark.slow, needs_peft]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"target": ["nothing"]}, r"method.target = \['nothing'\] cannot be adapted .* called .*query"),
        ({"target": ["query", "valeu"]}, r"cannot be adapted \(there is no layer 'valeu'\); .* called .*value"),
        ({"target": ["query", "classifier"]}, r"cannot be adapted \(there is no layer 'classifier'\)"),
        ({"target": ["all-linear", "query"]}, r"cannot be adapted \(there is no layer 'all-linear'\)"),
        ({"ranks": [40, 2]}, "rank 40 is above what .* 16 → 16, can have: choose at most 16"),
        ({"head": ["score"]}, "the model has no module 'score'"),
        ({"target": ["word_embeddings"]}, "a Embedding: adapters are for linear layers"),
    ],
)
def test_what_cannot_be_adapted_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fedhm.FedhmError, match=sentence):
        fedhm.run(tiny_bert(), DATA, TEST, settings(change))


def test_a_base_of_float64_is_refused_before_anybody_trains() -> None:
    with pytest.raises(fedhm.FedhmError, match=r"the base is float64: use model\.float\(\)"):
        fedhm.run(tiny_bert().double(), DATA, TEST, settings())


def test_a_model_that_changes_its_own_weights_is_no_base() -> None:
    model = tiny_bert()
    before = model.bert.pooler.dense.weight.detach().clone()
    model.bert.pooler.dense.register_forward_pre_hook(lambda layer, _: (layer.weight.data.mul_(0.5), None)[1])
    with pytest.raises(
        fedhm.FedhmError, match=r"forward changes 'bert\.pooler\.dense\.weight' itself, and cannot be a base"
    ):
        fedhm.run(model, DATA, TEST, settings())
    assert torch.equal(model.bert.pooler.dense.weight, before)


def test_an_adapter_is_not_written_onto_a_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(fedhm.FedhmError, match="there: it is a file, where a folder is needed"):
        save_adapter(
            started("lora", ranks=[2])[0].network(started("lora", ranks=[2])[0].spec("full")), tmp_path / "there"
        )


@pytest.mark.parametrize("name", ["lora", "hetlora", "flora", "homolora", "ffalora", "fedsa"])
def test_noise_at_the_server_is_refused(name: str) -> None:
    asked = {**settings(privacy={"noise": 1.0, "clip": 1.0}), "method": {"name": name}}
    with pytest.raises(fedhm.FedhmError, match="does not move its model by a plain mean of changes"):
        fedhm.run(tiny_bert(), DATA, TEST, asked)


@pytest.mark.parametrize("bad", [{"input_ids": [[1], [2]]}, {"input_ids": [[1, 2]], "labels": [[-100, -100]]}])
def test_texts_without_a_token_to_predict_are_refused(bad: dict[str, Any]) -> None:
    good = ({"input_ids": [[1, 2, 3], [4, 5]]}, None)
    asked = settings({"ranks": [1], "target": ["q_proj"]}, objective="causal_lm")
    for clients, test, whose in (([(bad, None), good], good, "client 0"), ([good], (bad, None), "the test set")):
        with pytest.raises(fedhm.FedhmError, match=f"{whose} has no token to predict: a text needs two tokens"):
            fedhm.run(tiny_llama(), clients, test, asked)


def test_a_client_that_is_left_without_a_token_to_predict_is_refused() -> None:
    clients = [({"input_ids": [[1, 2, 3], [4]]}, None) for _ in range(2)]
    asked = settings({"ranks": [1], "target": ["q_proj"]}, objective="causal_lm")
    with pytest.raises(fedhm.FedhmError, match=r"client \d has no token to predict"):
        fedhm.run(tiny_llama(), clients, clients[0], asked, client_test=0.5)


def test_a_tokenizer_of_another_model_and_too_long_texts_are_one_sentence() -> None:
    long = ({"input_ids": [[1] * 20, [2] * 3, [3] * 3]}, [0, 1, 2])
    for data, sentence in (
        (({"input_ids": [[1, 77], [2], [3]]}, [0, 1, 2]), "a token 77, but the model knows 40"),
        (long, "a text has 20 tokens, but the model reads at most 16"),
    ):
        with pytest.raises(fedhm.FedhmError, match=sentence):
            fedhm.run(tiny_bert(), [data, data], data, settings())


@pytest.mark.usefixtures("without_figures")
def test_an_adapter_for_another_base_or_other_layers_is_refused(tmp_path: Path) -> None:
    asked = settings(train={**TRAIN, "rounds": 1})
    fedhm.run(tiny_bert(), DATA, TEST, asked, tmp_path / "run")
    with pytest.raises(fedhm.FedhmError, match="other settings, data or initial model"):
        fedhm.run(tiny_bert(seed=1), DATA, TEST, asked, tmp_path / "run")
    with pytest.raises(fedhm.FedhmError, match=r"method\.target"):
        fedhm.run(tiny_bert(), DATA, TEST, settings({"target": ["key"]}, train=asked["train"]), tmp_path / "run")
    file = tmp_path / "run" / "models" / "full.safetensors"
    with pytest.raises(fedhm.FedhmError, match="trained on another base: give the model with which the run began"):
        fedhm.load_tier(file, tiny_bert(seed=1))
    with pytest.raises(fedhm.FedhmError, match="does not fit"):
        fedhm.load_tier(file, tiny_bert(classes=5))
    with pytest.raises(fedhm.FedhmError, match="the model has no module 'classifier'"):
        fedhm.load_tier(file, tiny_llama())


def test_a_node_with_another_base_is_refused() -> None:
    pytest.importorskip("flwr")
    from fedhm.data.samples import Preprocessing
    from fedhm.flower.clients import UserModel, _networks
    from fedhm.flower.wire import RunInfo, introduction_request

    config = parse(settings(), "test").resolved()
    base = base_digest(started("lora", ranks=RANKS)[0].network(started("lora", ranks=RANKS)[0].spec("full")))
    info = RunInfo(config, 3, Preprocessing(), base_digest=base)
    form = tuple((name, (1, 7), torch.int64) for name in ("input_ids", "attention_mask"))
    assert RunInfo.decode(introduction_request(info)).base_digest == base
    assert _networks(UserModel(tiny_bert, 0), info, "cpu", form)
    with pytest.raises(fedhm.FedhmError, match="this node's base is not the server's"):
        _networks(UserModel(lambda: tiny_bert(seed=1), 0), info, "cpu", form)


def test_an_adapter_too_large_for_half_precision_is_one_sentence() -> None:
    pytest.importorskip("flwr")
    from fedhm.flower.wire import decode_replies, encode_replies

    method, state, _ = started("lora", ranks=[2])
    layer = next(iter(method.base.shapes))
    (task,) = method.tasks(state, [Participant(0, "full")], 1)
    (update,) = answers(method, state, 1)
    large = replace(update, tensors={**update.tensors, f"{layer}.v": update.tensors[f"{layer}.v"] + 1e5})
    (reply,) = decode_replies(encode_replies([large], fp16=True), [task], fp16=True)
    assert isinstance(reply, Failure)
    assert f"'{layer}.v' holds 1e+05, too large for half precision: set engine.fp16 = false" in reply.reason


def test_factors_whose_product_overflows_are_one_sentence() -> None:
    method, state, _ = started("lora", ranks=[2])
    huge = [replace(u, tensors={n: t * 1e25 for n, t in u.tensors.items()}) for u in answers(method, state, 2)]
    with pytest.raises(fedhm.FedhmError, match="the mean of the adapters holds NaN or infinite values"):
        method.merge(state, huge, 1)


def test_without_peft_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(fedhm.FedhmError, match=r"pip install '\.\[lora\]'"):
        fedhm.run(tiny_bert(), DATA, TEST, settings())


def test_hostile_adapters_are_bounded_by_what_others_do() -> None:
    method, state, _ = started("lora", ranks=[2])
    layer = next(iter(method.base.shapes))
    poison: Callable[[Tensor], Tensor] = lambda t: t + 1e4  # noqa: E731
    honest = answers(method, state, 4)
    assert all(update.tensors[f"{layer}.v"].abs().max() < 10 for update in honest)
    asked = settings(train={**TRAIN, "rounds": 1, "on_bad_update": "drop"})
    federation = from_arrays(DATA, TEST)
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
