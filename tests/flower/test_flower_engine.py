"""Which node is which client, and the tasks of nodes that fail. Messages go to real apps in this process."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from torch import nn

from fedhm.config.loading import parse
from fedhm.data.samples import Preprocessing
from fedhm.errors import FedhmError
from fedhm.flower import client_app
from fedhm.flower.engine import FlowerEngine
from fedhm.flower.nodes import Node, NodeRegistry
from fedhm.flower.wire import RunInfo, introduction_request
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Failure, Task, Update
from flower_loopback import GarbledError, Loopback, LoopbackNode

CONFIG = parse({"federation": {"clients": 3}, "method": {"name": "fedavg"}, "train": {"batch": 4}}, "test").resolved()
INFO = RunInfo(CONFIG.resolved(), 2, Preprocessing())


def build_model() -> nn.Module:
    return nn.Linear(3, 2)


def data(_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(24.0).view(8, 3) / 24, torch.arange(8) % 2


def node(client: int, **config: str | int) -> LoopbackNode:
    return LoopbackNode(client_app(build_model, data), {"partition-id": client, "num-partitions": 3, **config})


def answering(change: Callable[[Message], Message]) -> LoopbackNode:
    """Return a node whose introductions are changed on their way."""
    honest, app = client_app(build_model, data), ClientApp()
    app.query()(lambda message, context: change(honest(message, context)))
    app.train()(honest)
    return LoopbackNode(app, {"partition-id": 1, "num-partitions": 3})


def claiming(**values: object) -> LoopbackNode:
    """Return a node whose introduction holds false values."""

    def change(message: Message) -> Message:
        message.content.config_records["fedhm"].update(values)  # type: ignore[arg-type]
        return message

    return answering(change)


def saying_nothing() -> LoopbackNode:
    def change(message: Message) -> Message:
        del message.content["fedhm"]
        return message

    return answering(change)


@pytest.fixture
def grid() -> Loopback:
    return Loopback({10: node(0), 11: node(1, tier="full"), 12: node(2, memory=64)})


@pytest.fixture
def said() -> list[str]:
    return []


def registry(grid: Loopback, said: list[str]) -> NodeRegistry:
    found = NodeRegistry(grid, 3, introduction_request(INFO), said.append)
    found.refresh()
    return found


def task(client: int, **changes: str) -> Task:
    tensors = {name: tensor.detach() for name, tensor in build_model().named_parameters()}
    return replace(Task("train", 1, client, "full", NetworkSpec("full"), tensors), **changes)  # type: ignore[arg-type]


def engine(grid: Loopback, said: list[str], deadline: float = 0.0) -> FlowerEngine:
    return FlowerEngine(grid, registry(grid, said), INFO, deadline, fp16=False)


def test_nodes_introduce_themselves(grid: Loopback, said: list[str]) -> None:
    found = registry(grid, said).connected()
    assert found == {0: Node(0, 8), 1: Node(1, 8, "full"), 2: Node(2, 8, "", 64 << 20)}
    assert said == []


def test_only_new_nodes_are_asked(grid: Loopback, said: list[str]) -> None:
    found = registry(grid, said)
    grid.nodes[13] = node(0)
    found.refresh()
    found.refresh()
    assert [message.metadata.dst_node_id for message in grid.pushed] == [10, 11, 12, 13]


def test_a_restarted_node_replaces_the_one_before_it(grid: Loopback, said: list[str]) -> None:
    found = registry(grid, said)
    grid.nodes[13] = node(1)
    found.refresh()
    assert found.node_id(1) == 11  # Flower still lists it
    assert said == ["client 1 is connected already: node 13 waits until it is gone"]
    del grid.nodes[11]
    found.refresh()
    assert found.node_id(1) == 13
    del grid.nodes[13]
    found.refresh()
    assert found.node_id(1) is None


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        (node(7), "it calls itself client 7, but there are 3, from 0"),
        (node(-1), "it calls itself client -1, but there are 3, from 0"),
        (node(True), "the node config must say which client this is"),
        (LoopbackNode(client_app(build_model, data), {}), "the node config must say which client this is"),
        (LoopbackNode(ClientApp(), {}), "No query function registered"),
        (claiming(samples=0), "it claims 0 samples"),
        (claiming(samples=2.5), "values of wrong types"),
        (claiming(client=True), "values of wrong types"),
        (claiming(more=1), "unexpected keyword"),
        (saying_nothing(), "fedhm"),
    ],
)
def test_unusable_nodes_are_left_out(stranger: LoopbackNode, reason: str, said: list[str]) -> None:
    found = registry(Loopback({10: node(0), 13: stranger}), said)
    assert set(found.connected()) == {0}
    assert len(said) == 1
    assert said[0].startswith("node 13 is not used: ")
    assert reason in said[0]


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        (node(1, memory="much"), "FedhmError: the node config's memory: 'much' is no size"),
        (LoopbackNode(client_app(build_model, lambda _: 1 / 0), {"partition-id": 1}), "division by zero"),  # type: ignore[arg-type]
        (claiming(problem="[/red]\x1b[31m no disk"), "[/red]�[31m no disk"),
    ],
)
def test_a_client_that_cannot_take_part_is_known_and_left_out(
    stranger: LoopbackNode, reason: str, grid: Loopback, said: list[str]
) -> None:
    grid.nodes[11] = stranger
    running = registry(grid, said)
    running.wait_for(3, 0)  # it is connected
    assert len(said) == 1
    assert said[0].startswith("client 1 takes no part: ")
    assert reason in said[0]
    replies = {r.client: r for r in FlowerEngine(grid, running, INFO, 0, fp16=False).run([task(0), task(1)])}
    assert isinstance(replies[0], Update)
    assert isinstance(replies[1], Failure)
    assert reason in replies[1].reason


def test_missing_clients_are_named(grid: Loopback, said: list[str]) -> None:
    grid.nodes = {10: node(0), 14: node(9)}
    with pytest.raises(FedhmError, match=r"2 of 3 clients did not connect .*partition-id 1, 2; node 14 is"):
        registry(grid, said).wait_for(3, 0)


def test_a_silent_node_delays_nobody(grid: Loopback, said: list[str]) -> None:
    grid.nodes[11].silent = True
    began = time.monotonic()
    replies = list(engine(grid, said).run([task(0), task(1)]))
    assert time.monotonic() - began < 20
    assert {reply.client: type(reply) for reply in replies} == {0: Update, 1: Failure}
    assert [message.metadata.dst_node_id for message in grid.pushed].count(11) == 1  # asked once, not again and again


def test_a_node_whose_first_process_died_is_asked_again(grid: Loopback, said: list[str]) -> None:
    honest = grid.nodes[11].app
    grid.nodes[11].app = Dying()  # type: ignore[assignment]
    found = registry(grid, said)
    assert found.node_id(1) is None
    grid.nodes[11].app = honest
    found.refresh()
    assert found.node_id(1) == 11


def test_a_node_that_reconnects_is_asked_again(grid: Loopback, said: list[str]) -> None:
    """With a key it keeps its id, but it may have other data by then."""
    found = registry(grid, said)
    gone = grid.nodes.pop(11)
    found.refresh()
    gone.app = client_app(build_model, lambda c: tuple(part[:4] for part in data(c)))
    grid.nodes[11] = gone
    found.refresh()
    assert found.connected()[1].samples == 4


class Dying:
    """An app whose process died, as Flower reports it."""

    def __call__(self, message: Message, _: object) -> Message:
        return Message(Error(8, "killed"), reply_to=message)


def test_an_unreadable_reply_costs_no_other(grid: Loopback, said: list[str]) -> None:
    running = engine(grid, said)
    grid.nodes[10].app = Garbled()  # type: ignore[assignment]
    replies = {reply.client: reply for reply in running.run([task(0), task(1), task(2)])}
    assert isinstance(replies[0], Failure)
    assert replies[0].reason == "it cannot be read (GarbledError)"
    assert isinstance(replies[1], Update)
    assert isinstance(replies[2], Update)


class Garbled:
    def __call__(self, *_: object) -> Message:
        raise GarbledError


def test_replies_far_behind_a_missing_one_are_not_fetched_yet(
    grid: Loopback, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedhm.flower.engine.FETCH_AHEAD", 2)
    running = engine(grid, said, deadline=3)
    grid.nodes[10].silent = True
    replies = running.run([task(0), task(1), task(2)])
    assert next(replies).client == 1
    assert len(grid.replies) == 1  # that of client 2 was not fetched yet
    assert [(reply.client, type(reply)) for reply in replies] == [(2, Update), (0, Failure)]


def test_each_task_gets_one_reply_with_its_bytes(grid: Loopback, said: list[str]) -> None:
    tasks = [task(0), task(1), task(0)]
    replies = sorted(engine(grid, said).run(tasks), key=lambda reply: reply.position)
    assert [(reply.position, reply.client) for reply in replies] == [(0, 0), (1, 1), (2, 0)]
    assert all(isinstance(reply, Update) and reply.up and reply.down for reply in replies)
    trained = [message for message in grid.pushed if message.metadata.message_type == "train"]
    assert len(trained) == 2  # one for each client


def test_failures_cost_only_their_tasks(grid: Loopback, said: list[str]) -> None:
    grid.nodes[11] = node(1)
    grid.nodes[12].silent = False
    running = engine(grid, said, deadline=2)
    grid.nodes[10].app = ClientApp()  # it cannot train
    del grid.nodes[11]
    grid.nodes[12].silent = True
    replies = {reply.client: reply for reply in running.run([task(0), task(1), task(2)])}
    assert all(isinstance(reply, Failure) for reply in replies.values())
    reasons = {client: reply.reason for client, reply in replies.items() if isinstance(reply, Failure)}
    assert reasons[0] == "its ClientApp raised an exception: No train function registered with name 'default'"
    assert reasons[1] == "it is not connected"
    assert reasons[2] == "it did not answer within 2 s (engine.deadline)"
    assert replies[1].down == 0
    assert replies[0].down


def test_a_reply_with_another_number_of_samples_than_introduced_is_refused(grid: Loopback, said: list[str]) -> None:
    running = engine(grid, said)
    grid.nodes[10] = LoopbackNode(
        client_app(build_model, lambda c: tuple(part[:4] for part in data(c))), grid.nodes[10].config
    )
    (reply,) = running.run([task(0)])
    assert isinstance(reply, Failure)
    assert reply.reason == "it claims 4 samples, but said that it has 8"


def test_a_client_refuses_the_task_of_another(grid: Loopback, said: list[str]) -> None:
    running = engine(grid, said)
    grid.nodes[10].config["partition-id"] = 2
    (reply,) = running.run([task(0)])
    assert reply == Failure(0, "its task came to client 2", 0, down=reply.down, up=reply.up)
