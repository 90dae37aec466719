"""Texts are padded as the model expects it, and what it cannot read is refused before the first round."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fedhm
from fedhm.config.loading import parse
from fedhm.config.registry import make
from fedhm.data.convert import to_samples
from fedhm.data.federation import from_arrays
from fedhm.data.samples import Feed, Preprocessing
from fedhm.data.text import text_limits, to_text
from fedhm.networks.inputs import forward_batch
from fedhm.work.messages import Failure, Participant
from made_adapters import DATA, TEST, settings, started
from tiny_transformers import needs_peft, tiny_bert, tiny_gpt2_classifier, tiny_llama, tiny_roberta

pytestmark = [pytest.mark.slow, needs_peft]
TARGET = {"target": ["c_attn"]}


@pytest.mark.parametrize("padding", [0, 1, 39])
def test_a_batch_of_texts_gives_what_each_gives_alone(padding: int) -> None:
    model = tiny_gpt2_classifier(padding).eval()
    federation = from_arrays(DATA, TEST)
    asked = settings(TARGET, federation={"clients": 3, "participation": 1.0})
    experiment = fedhm.assemble(model, federation, parse(asked, "test"))
    assert experiment.evaluation.test is not None
    for feed in (experiment.evaluation.test, experiment.engine._clients[0].feed):  # type: ignore[attr-defined]
        with torch.no_grad():
            alone = torch.cat([forward_batch(model, inputs) for inputs, _ in feed.ordered(1)])
            together = torch.cat([forward_batch(model, inputs) for inputs, _ in feed.ordered(8)])
        torch.testing.assert_close(together, alone)


def test_a_classifier_by_the_last_token_without_a_token_of_padding_is_refused() -> None:
    with pytest.raises(fedhm.FedhmError, match=r"no token of padding .* set model\.config\.pad_token_id"):
        fedhm.run(tiny_gpt2_classifier(None), DATA, TEST, settings(TARGET))


def test_segments_and_masks_are_padded_with_nothing() -> None:
    data = {"input_ids": [[5, 6, 7], [8]], "token_type_ids": [[0, 1, 1], [1]]}
    text = to_samples((data, [0, 1]), "it", torch.float32, make("objectives", "classification"))
    fitted = text_limits(tiny_roberta()).fitted  # which is padded with token 1
    batch, _ = next(Feed(fitted(text, "it"), Preprocessing()).ordered(2))
    assert batch["input_ids"].tolist() == [[8, 1, 1], [5, 6, 7]]
    assert batch["token_type_ids"].tolist() == [[1, 0, 0], [0, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_what_a_tokenizer_has_filled_up_is_cut(kind: Any) -> None:
    ids, mask = [[5, 6, 0, 0], [7, 8, 9, 0]], [[1, 1, 0, 0], [1, 1, 1, 0]]
    text = to_text(({"input_ids": kind(ids), "attention_mask": kind(mask)}, [0, 1]), "it", False)
    assert text is not None
    assert text.tokens.lengths.tolist() == [2, 3]


def test_what_a_data_set_of_hugging_face_has_filled_up_is_cut() -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"input_ids": [[5, 6, 0], [7, 0, 0]], "attention_mask": [[1, 1, 0], [1, 0, 0]], "label": [0, 1]}
    text = to_text(datasets.Dataset.from_dict(columns), "it", False)
    assert text.tokens.lengths.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("make_model", "bad", "sentence"),
    [
        (tiny_bert, {"input_ids": [[1, -2], [2, 3], [3]]}, "the 'input_ids' of client 0 must not be negative"),
        (
            tiny_bert,
            {"input_ids": [[1], [2], [3]], "token_type_ids": [[2], [0], [1]]},
            "up to 2, but the model knows 2",
        ),
        (tiny_roberta, {"input_ids": [[5] * 17, [2], [3]]}, "a text has 17 tokens, but the model reads at most 16"),
        (tiny_bert, {"input_ids": [[1, 77], [2], [3]]}, "the tokenizer of .* a token 77, but the model knows 40"),
    ],
)
def test_what_the_model_cannot_read_is_one_sentence(make_model: Any, bad: dict[str, Any], sentence: str) -> None:
    data = (bad, [0, 1, 2])
    with pytest.raises(fedhm.FedhmError, match=sentence):
        fedhm.run(make_model(), [data, data], data, settings())


def test_roberta_reads_as_many_tokens_as_it_has_positions() -> None:
    long = ({"input_ids": [[5] * 16, [2], [3]]}, [0, 1, 2])
    assert fedhm.run(tiny_roberta(), [long, long], long, settings({"ranks": [1]})).metrics["full"]


def test_models_that_read_no_text_have_no_limits() -> None:
    assert text_limits(torch.nn.Linear(2, 2)).tokens is None
    assert text_limits(tiny_llama()).length == 16


def test_a_client_whose_tokens_the_network_does_not_know_fails_by_a_sentence() -> None:
    from fedhm.assembly import make_client
    from fedhm.networks.reuse import NetworkPool

    config = parse(settings(), "test").resolved()
    method, state, _ = started("lora", ranks=[2])
    bad = to_samples(({"input_ids": [[1, 77], [2, 3]]}, [0, 1]), "it", torch.float32, config.objective)
    client = make_client(bad, Preprocessing(), NetworkPool(method.network), config, None)
    (task,) = method.tasks(state, [Participant(0, "full")], 1)
    reply = client.reply(task)
    assert isinstance(reply, Failure)
    assert "its samples do not fit the network" in reply.reason


def test_a_node_whose_tokenizer_does_not_fit_says_so() -> None:
    pytest.importorskip("flwr")
    from fedhm.flower import client_app
    from fedhm.flower.nodes import NodeRegistry
    from fedhm.flower.wire import RunInfo, introduction_request
    from flower_loopback import Loopback, LoopbackNode

    bad = ({"input_ids": [[1, 77], [2, 3], [3]]}, [0, 1, 2])
    apps = [client_app(tiny_bert, lambda _, data=data: data) for data in (DATA[0], bad)]
    grid = Loopback({n + 1: LoopbackNode(app, {"partition-id": n}) for n, app in enumerate(apps)})
    said: list[str] = []
    info = RunInfo(parse(settings(), "test").resolved(), 3, Preprocessing())
    registry = NodeRegistry(grid, 2, introduction_request(info), said.append)
    registry.wait(1)
    assert registry.connected()[0].samples == len(DATA[0][1])
    assert [line for line in said if "client 1 takes no part" in line and "a token 77, but the model knows 40" in line]


def test_a_server_that_has_no_texts_asks_what_they_are_like(tmp_path: Path) -> None:
    """Their lengths differ from client to client, which keeps nobody from agreeing."""
    pytest.importorskip("flwr")
    from flwr.app import Context, RecordDict

    from fedhm.flower import client_app, server_app
    from flower_loopback import Loopback, LoopbackNode

    apps = [client_app(tiny_bert, lambda _, data=data: data) for data in DATA]
    grid = Loopback({n + 1: LoopbackNode(app, {"partition-id": n}) for n, app in enumerate(apps)})
    asked = settings({"ranks": "[2]"}, federation={"clients": len(DATA), "participation": 1.0})
    flat = {f"{section}.{key}": value for section, values in asked.items() for key, value in values.items()}
    flat |= {"train.milestones": "[]", "engine.patience": 0.0, "out": str(tmp_path / "run")}
    server_app(tiny_bert)(grid, Context(1, 1, {}, RecordDict(), flat))  # type: ignore[arg-type]
    assert 'inputs = "attention_mask+input_ids 8"' in (tmp_path / "run" / "config.toml").read_text()
