"""Thousands of damaged, hostile and stale replies, as Flower delivers them: none is merged, nothing crashes."""

import json
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedhm.assembly import assemble
from fedhm.config.loading import parse
from fedhm.data.federation import remote_federation
from fedhm.data.samples import Preprocessing
from fedhm.flower import client_app
from fedhm.flower.clients import UserModel
from fedhm.flower.engine import FlowerEngine
from fedhm.flower.nodes import NodeRegistry
from fedhm.flower.wire import JSON_RECORD, RunInfo, decode_replies, decode_tasks, encode_replies, introduction_request
from fedhm.networks.spec import NetworkSpec
from fedhm.report.result import Result
from fedhm.work.messages import Failure, Reply, Task, Update
from flower_loopback import GarbledError, Loopback, LoopbackNode

CLIENTS, ROUNDS = 20, 150
RANDOM = np.random.default_rng(0)


def with_array(content: RecordDict, change: Callable[[Array], Array], name: str | None = None) -> RecordDict:
    arrays = dict(content.array_records["tensors.0"])
    name = name or str(RANDOM.choice(sorted(arrays)))
    return RecordDict({**content, "tensors.0": ArrayRecord({**arrays, name: change(arrays[name])})})


def with_values(content: RecordDict, change: Callable[[Any], Any]) -> RecordDict:
    listed = json.loads(str(content.config_records[JSON_RECORD]["replies"]))
    return RecordDict({**content, JSON_RECORD: ConfigRecord({"replies": json.dumps(change(listed))})})


def with_value(key: str, value: Any) -> Callable[[RecordDict], RecordDict]:
    return lambda content: with_values(content, lambda listed: [{**listed[0], key: value}])


def filled(value: float) -> Callable[[Array], Array]:
    def change(array: Array) -> Array:
        numbers = array.numpy().copy()
        numbers.reshape(-1)[int(RANDOM.integers(numbers.size))] = value
        return Array(numbers)

    return change


def reshaped(shape: tuple[int, ...]) -> Callable[[Array], Array]:
    return lambda _: Array(np.zeros(shape, dtype=np.float32))


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[RecordDict], RecordDict]:
    return lambda content: with_array(content, lambda a: Array(a.dtype, a.shape, a.stype, change(a.data)))


def other_header(data: bytes) -> bytes:
    """Replace a letter or digit of the shape or type; changes in other places might not matter."""
    begin, end = data.index(b"{"), data.index(b"}")
    places = [place for place in range(begin, end) if bytes([data[place]]).isalnum()]
    place = places[int(RANDOM.integers(len(places)))]
    return data[:place] + b"?" + data[place + 1 :]


def saved(array: "np.ndarray[Any, Any]") -> bytes:
    file = BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def zipped(_: bytes) -> bytes:
    file = BytesIO()
    np.savez(file, np.zeros(3))
    return file.getvalue()


def stretched(data: bytes) -> bytes:
    """Return an array whose header claims more than any memory holds."""
    return data.replace(b"(", b"(99999999999, ", 1)


def without(content: RecordDict) -> RecordDict:
    arrays = dict(content.array_records["tensors.0"])
    arrays.pop(str(RANDOM.choice(sorted(arrays))))
    return RecordDict({**content, "tensors.0": ArrayRecord(arrays)})


DAMAGES: dict[str, Callable[[RecordDict], RecordDict]] = {
    "NaN": lambda c: with_array(c, filled(np.nan)),
    "infinite": lambda c: with_array(c, filled(np.inf)),
    "huge": lambda c: with_array(c, filled(1e30)),
    "large": lambda c: with_array(c, lambda a: Array(a.numpy() * np.float32(1e6) + np.float32(1e6))),
    "wrong rank": lambda c: with_array(c, reshaped((8, 1))),
    "would broadcast": lambda c: with_array(c, reshaped((1,))),
    "would broadcast to all": lambda c: with_array(c, reshaped(())),
    "transposed": lambda c: with_array(c, lambda a: Array(a.numpy().T.copy()), "0.weight"),
    "float64": lambda c: with_array(c, lambda a: Array(a.numpy().astype(np.float64))),
    "integers": lambda c: with_array(c, lambda a: Array(a.numpy().astype(np.int32))),
    "complex": lambda c: with_array(c, lambda a: Array(a.numpy().astype(np.complex64))),
    "other byte order": lambda c: with_array(c, lambda a: Array(a.numpy().astype(">f4"))),
    "truncated": with_bytes(lambda data: data[: int(RANDOM.integers(len(data)))]),
    "header": with_bytes(other_header),
    "garbage": with_bytes(lambda data: RANDOM.bytes(len(data))),
    "empty": with_bytes(lambda _: b""),
    "pickle": with_bytes(lambda _: saved(np.array([print], dtype=object))),
    "zip": with_bytes(zipped),
    "endless": with_bytes(stretched),
    "missing tensor": without,
    "additional tensor": lambda c: RecordDict(
        {**c, "tensors.0": ArrayRecord({**c.array_records["tensors.0"], "more": Array(np.zeros(3, np.float32))})}
    ),
    "unending name": lambda c: RecordDict({**c, "tensors." + "9" * 5000: c["tensors.0"]}),
    "half precision": lambda c: with_array(c, lambda a: Array(a.numpy().astype(np.float16))),
    "no tensors": lambda c: RecordDict({JSON_RECORD: c[JSON_RECORD]}),
    "no note": lambda c: RecordDict({key: record for key, record in c.items() if key != JSON_RECORD}),
    "note of another kind": lambda c: RecordDict({**c, JSON_RECORD: c["tensors.0"]}),
    "nothing": lambda _: RecordDict(),
    "kept": lambda c: RecordDict({**c, "kept.0": c["tensors.0"]}),
    "not JSON": lambda c: RecordDict({**c, JSON_RECORD: ConfigRecord({"replies": "{" * 5000})}),
    "deep": lambda c: RecordDict({**c, JSON_RECORD: ConfigRecord({"replies": "[" * 50_000 + "]" * 50_000})}),
    "no list": lambda c: with_values(c, lambda listed: listed[0]),
    "two replies": lambda c: with_values(c, lambda listed: listed * 2),
    "empty text": lambda c: RecordDict({**c, JSON_RECORD: ConfigRecord({"replies": ""})}),
    "empty bytes": lambda c: RecordDict({**c, "more": ConfigRecord({"x": b""})}),
    "empty list": lambda c: RecordDict({**c, "more": ConfigRecord({"x": []})}),
    "client is a list": with_value("client", []),
    "client is a table": with_value("client", {}),
    "unknown field": with_value("code", "import os"),
    "own position": with_value("position", 0),
    "claimed bytes": with_value("up", -1),
    "negative samples": with_value("samples", -5),
    "all the weight": with_value("samples", 10**18),
    "half a sample": with_value("samples", 2.5),
    "samples as text": with_value("samples", "40"),
    "samples as truth": with_value("samples", True),
    "loss as text": with_value("loss", "0.1"),
    "loss without bound": with_value("loss", float("inf")),
    "foreign labels": with_value("labels", [0, 99]),
    "nested labels": with_value("labels", [[0], [1]]),
    "labels as text": with_value("labels", "01"),
    "old round": with_value("round", 0),
    "later round": with_value("round", 10**6),
    "round as text": with_value("round", "1"),
    "other client": with_value("client", 7_000),
    "other tier": with_value("tier", "1/2"),
    "other network": with_value("network", "1/2"),
    "other kind": with_value("kind", "statistics"),
    "kind as list": with_value("kind", ["train"]),
}


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))


def samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(number))
    return inputs, inputs[:, :3].argmax(dim=1)


class Hostile:
    """A client that trains, and then damages its reply in another way in each round."""

    def __init__(self, client: int) -> None:
        self.sent: list[str] = []
        self._client = client
        self._honest = client_app(build_model, lambda _: samples(client))
        self._old: RecordDict | None = None
        self.app = ClientApp()
        self.app.query()(self._honest)
        self.app.train()(self._train)

    def _train(self, message: Message, context: Context) -> Message:
        content = self._honest(message, context).content
        round_number = decode_tasks(message.content)[0].round
        choices = [*sorted(DAMAGES), "stale", "garbled"]
        name = choices[(round_number * (CLIENTS - 1) + self._client) % len(choices)]  # each in its turn
        self.sent.append(name)
        if name == "garbled" or (name == "stale" and self._old is None):
            raise GarbledError(name)
        damaged = self._old if name == "stale" else DAMAGES[name](content)
        self._old = content
        assert damaged is not None
        return Message(damaged, reply_to=message)


class Silent:
    """In its place, a client that does not answer at all."""

    def __init__(self, client: int) -> None:
        self.sent: list[str] = []
        self.app = ClientApp()
        self.app.query()(client_app(build_model, lambda _: samples(client)))


def run(kind: type[Hostile] | type[Silent]) -> tuple[list[Hostile | Silent], Result]:
    table = {
        "federation": {"clients": CLIENTS, "participation": 1.0},
        "train": {"rounds": ROUNDS, "batch": 8, "lr": 0.01},
        "method": {"name": "fedavg"},
        "evaluation": {"every": ROUNDS},
        "engine": {"name": "flower", "threads": 1, "server_threads": 1},
    }
    config = parse(table, "test").resolved()
    others = [kind(client) for client in range(1, CLIENTS)]
    apps = [client_app(build_model, lambda _: samples(0)), *(other.app for other in others)]
    grid = Loopback({100 + number: LoopbackNode(app, {"partition-id": number}) for number, app in enumerate(apps)})
    federation = remote_federation(samples(99), 3, [8] * CLIENTS, Preprocessing())
    info = RunInfo(config.resolved(), 3, federation.preprocessing)
    registry = NodeRegistry(grid, CLIENTS, introduction_request(info), print)
    engine = FlowerEngine(grid, registry, info, deadline=0, fp16=False)
    return others, assemble(UserModel(build_model, 0).build(), federation, config, engine).run()


@pytest.mark.slow
def test_nothing_damaged_is_merged_and_nothing_crashes() -> None:
    hostile, result = run(Hostile)
    _, without_them = run(Silent)
    names = [name for client in hostile for name in client.sent]
    assert len(names) == (CLIENTS - 1) * ROUNDS >= 2000
    assert set(names) == {*DAMAGES, "stale", "garbled"}
    for name, tensor in result.networks["full"].state_dict().items():
        assert torch.equal(tensor, without_them.networks["full"].state_dict()[name]), name
    for record in result.records:
        assert [each["client"] for each in record.dropped] == list(range(1, CLIENTS))
        assert all(each["reason"] for each in record.dropped)


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_each_damage_changes_the_reply(name: str) -> None:
    """A damage without an effect would prove nothing."""
    tensors = {"0.weight": torch.ones(4, 3), "0.bias": torch.ones(4)}
    task = Task("train", 3, 1, "full", NetworkSpec("full"), tensors)
    sent = Update("train", 3, 1, "full", NetworkSpec("full"), tensors, 8, (0, 1), 0.5)
    content = encode_replies([sent], fp16=False)
    (honest,) = decode_replies(content, [task], fp16=False)
    (damaged,) = decode_replies(DAMAGES[name](content), [task], fp16=False)
    assert isinstance(honest, Update)
    assert isinstance(damaged, Failure) or _differs(honest, damaged)


def _differs(one: Update, other: Reply) -> bool:
    assert isinstance(other, Update)
    plain = {k: v for k, v in vars(one).items() if k not in ("tensors", "kept")}
    if plain != {k: v for k, v in vars(other).items() if k not in ("tensors", "kept")} or other.kept:
        return True
    if set(one.tensors) != set(other.tensors):
        return True
    pairs = [(tensor, other.tensors[name]) for name, tensor in one.tensors.items()]
    return any(a.dtype != b.dtype or not torch.equal(a, b) for a, b in pairs)
