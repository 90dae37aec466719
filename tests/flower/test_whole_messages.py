"""Messages of any content that Flower can carry, as replies and as introductions: each costs only its sender."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedhm.config.loading import parse
from fedhm.data.samples import Preprocessing
from fedhm.flower import client_app
from fedhm.flower.engine import FlowerEngine
from fedhm.flower.nodes import NodeRegistry
from fedhm.flower.wire import JSON_RECORD, RunInfo, encode_replies, introduction_request
from fedhm.networks.spec import NetworkSpec
from fedhm.server.filters.admission import reason_to_refuse
from fedhm.work.messages import Failure, Reply, Task, Update
from fedhm.work.work import Expected
from flower_loopback import Loopback, LoopbackNode

Loopback()  # says who this process is, which a message has to know
CONFIG = parse({"federation": {"clients": 2}, "method": {"name": "fedavg"}, "train": {"batch": 4}}, "test").resolved()
INFO = RunInfo(CONFIG, 2, Preprocessing())
TENSORS = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
HONEST = encode_replies([Update("train", 1, 1, "full", NetworkSpec("full"), TENSORS, 8, (0, 1), 0.5)], fp16=False)
TASK = Task("train", 1, 1, "full", NetworkSpec("full"), TENSORS)
VALUES: dict[str, Any] = json.loads(str(HONEST.config_records[JSON_RECORD]["replies"]))[0]
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

numbers = st.integers(-(2**63), 2**63 - 1) | st.floats()
texts = st.text(max_size=20) | st.sampled_from(["", "\x1b[2J", "\ud800", "[", "9" * 5000])
scalars = numbers | texts.map(lambda text: text.encode(errors="replace").decode()) | st.booleans() | st.binary()
lists = st.one_of(*(st.lists(kind, max_size=3) for kind in (st.integers(0, 9), st.floats(), st.text(), st.binary())))
junk = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.just(10**4000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
) | st.integers(1, 980).map(lambda depth: json.loads("[" * depth + "]" * depth))
array_bytes = st.binary(max_size=60) | st.sampled_from(sorted({a.data for a in HONEST["tensors.0"].values()}))
arrays = st.builds(
    lambda data, shape: Array("float32", tuple(shape), "numpy.ndarray", data), array_bytes, st.just((2,))
)
array_records = st.dictionaries(st.sampled_from(["weight", "bias", "", "x"]), arrays, max_size=3).map(ArrayRecord)
config_records = st.dictionaries(
    st.sampled_from(["replies", "terms", "client", "samples", "x"]), scalars | lists, max_size=3
).map(ConfigRecord)
metric_records = st.dictionaries(st.text(max_size=5), st.integers(0, 2**62) | st.floats(), max_size=2).map(MetricRecord)
kinds = array_records | config_records | metric_records
keys = st.sampled_from([JSON_RECORD, "tensors.0", "kept.0", "tensors.1", "x", ""])
# what the engine expects, with some of its values and records in another's place or beside them
notes = (
    st.dictionaries(st.sampled_from([*VALUES, "failure", "position", "up", "x"]), junk, max_size=3)
    .map(lambda changes: [{**VALUES, **changes}])
    .flatmap(lambda listed: st.sampled_from([listed, listed * 2, listed[0], []]))
)
any_note = (notes | junk).map(lambda values: ConfigRecord({"replies": json.dumps(values)}))
contents: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        lambda note, more: RecordDict({**HONEST, JSON_RECORD: note, **more}), any_note, st.dictionaries(keys, kinds)
    ),
    st.dictionaries(keys, kinds, max_size=4).map(RecordDict),
    kinds,
    arrays,
    st.builds(lambda: Message(RecordDict(), 1, "train")),
    st.builds(Error, st.integers(-1, 2**31), texts),
)


def build_model() -> nn.Module:
    return nn.Linear(3, 2)


def data(_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(24.0).view(8, 3) / 24, torch.arange(8) % 2


class Answering:
    """An app that answers with a given content."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __call__(self, message: Message, _: Context) -> Message:
        if isinstance(self.content, Error):
            return Message(self.content, reply_to=message)
        answer = Message(RecordDict(), reply_to=message)
        answer.__dict__["_content"] = self.content  # as Flower's own reading of bytes leaves it, which looks at no type
        return answer


def answer_to(task: Task, content: Any) -> Reply:
    """Return the engine's reply for the content of a message from client 1."""
    nodes = [LoopbackNode(client_app(build_model, data), {"partition-id": n}) for n in range(2)]
    grid = Loopback(dict(enumerate(nodes, start=10)))
    registry = NodeRegistry(grid, 2, introduction_request(INFO), lambda _: None)
    registry.refresh()
    nodes[1].app = Answering(content)  # type: ignore[assignment]
    (reply,) = FlowerEngine(grid, registry, INFO, 0, fp16=False).run([task])
    return reply


def changed(**values: Any) -> RecordDict:
    return RecordDict({**HONEST, JSON_RECORD: ConfigRecord({"replies": json.dumps([{**VALUES, **values}])})})


NAMED = {
    "an entry that is an empty text": RecordDict({**HONEST, "more": ConfigRecord({"x": ""})}),
    "an entry that is an empty list": RecordDict({**HONEST, "more": ConfigRecord({"x": []})}),
    "an empty text among the replies": RecordDict(
        {**HONEST, JSON_RECORD: ConfigRecord({**HONEST[JSON_RECORD], "x": ""})}
    ),
    "an empty text for the replies": RecordDict({**HONEST, JSON_RECORD: ConfigRecord({"replies": ""})}),
    "a client that is a list": changed(client=[]),
    "a client that is a table": changed(client={}),
    "samples that are nested too deep to be written": changed(samples=json.loads("[" * 900 + "]" * 900)),
    "content that is an ArrayRecord": HONEST["tensors.0"],
    "content that is an Array": HONEST.array_records["tensors.0"]["bias"],
    "no content": None,
}


@pytest.mark.parametrize("name", NAMED)
def test_contents_that_once_ended_the_whole_run(name: str) -> None:
    reply = answer_to(TASK, NAMED[name])
    assert isinstance(reply, Failure) or reason_to_refuse(reply, TASK, Expected(TENSORS, 8, 2, labelled=True))


@pytest.mark.slow
@given(contents)
@FUZZ
def test_any_reply_is_a_failure_or_reaches_admission(content: Any) -> None:
    reply = answer_to(TASK, content)
    # the client holds more labels than there are, so that not even what nothing was done to may be merged
    judged = Expected(TENSORS, 8, 1, labelled=True)
    assert (reply.client == 1 and reply.reason) if isinstance(reply, Failure) else reason_to_refuse(reply, TASK, judged)
    assert type(reply.up) is int


def test_the_honest_reply_is_accepted() -> None:
    reply = answer_to(TASK, HONEST)
    assert isinstance(reply, Update)
    assert reason_to_refuse(reply, TASK, Expected(TENSORS, 8, 2, labelled=True)) is None


@pytest.mark.parametrize("dtype", ["U3", "datetime64[s]", "V8", "longdouble"])
def test_arrays_of_types_unknown_to_torch_are_refused(dtype: str) -> None:
    record = ArrayRecord({**HONEST.array_records["tensors.0"], "bias": Array(np.zeros(2, dtype=dtype))})
    assert isinstance(answer_to(TASK, RecordDict({**HONEST, "tensors.0": record})), Failure)


def connected(content: Any) -> tuple[NodeRegistry, list[str]]:
    said: list[str] = []
    honest = LoopbackNode(client_app(build_model, data), {"partition-id": 0})
    stranger = LoopbackNode(Answering(content), {})  # type: ignore[arg-type]
    registry = NodeRegistry(Loopback({10: honest, 13: stranger}), 2, introduction_request(INFO), said.append)
    registry.refresh()
    return registry, said


@given(contents)
@FUZZ
def test_any_introduction_leaves_other_nodes_alone(content: Any) -> None:
    registry, said = connected(content)
    assert registry.node_id(0) == 10
    assert all(sentence.isprintable() and len(sentence) < 400 for sentence in said)


def test_a_huge_number_of_samples_is_accepted() -> None:
    about = {"client": 1, "samples": 2**63 - 1, "tier": "", "memory": 2**63 - 1}
    registry, said = connected(RecordDict({JSON_RECORD: ConfigRecord(about)}))
    assert registry.connected()[1].samples == 2**63 - 1
    assert not said
