"""Which of Flower's nodes is which client. Their ids say nothing of it, so nodes are asked."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message_type import MessageType
from flwr.serverapp import Grid

from fedhm.errors import FedhmError
from fedhm.flower.mail import BY_THE_APP, UnreadableError, describe, pull, push
from fedhm.flower.wire import NOTE
from fedhm.machine.printable import printable

ANSWER_WITHIN = 120.0  # seconds that a node has to say who it is, before it is asked again
PAUSE = 0.5  # seconds between two looks, while one waits for nodes


@dataclass(frozen=True)
class Node:
    """What a node says of itself."""

    client: int  # its number, from 0
    samples: int
    tier: str = ""  # the tier that it can afford,
    memory: int = 0  # or the bytes that it can spare for training; with neither, the server chooses
    problem: str = ""  # why it cannot take part
    tests: int = 0  # how many test samples it has beside the others

    def introduction(self) -> RecordDict:
        return RecordDict({NOTE: ConfigRecord({**vars(self)})})

    @classmethod
    def read(cls, content: RecordDict) -> "Node":
        """Read what a node says of itself; raise if it is not of this form."""
        note: dict[str, Any] = dict(content.config_records[NOTE])
        node = cls(**note)
        numbers = (node.client, node.samples, node.memory, node.tests)
        if not all(type(number) is int for number in numbers) or not all(
            isinstance(text, str) for text in (node.tier, node.problem)
        ):
            raise ValueError("its answer holds values of wrong types")
        if node.samples < (0 if node.problem else 1) or node.memory < 0 or node.tests < 0:
            raise ValueError(
                f"it claims {node.samples} samples, {node.tests} test samples and {node.memory} bytes of memory"
            )
        return node


class Roster:
    """Clients and the nodes behind them. Nobody waits for a node that does not answer, except at the start.

    Of several nodes that call themselves the same client, the first counts for as long as it is connected: Flower takes
    a SuperNode that was killed for connected for another minute, in which the one that was started in its place waits.
    With the same key it would be refused, and exit.
    """

    def __init__(self, grid: Grid, clients: int, greeting: RecordDict, say: Callable[[str], None]) -> None:
        self._grid, self._clients, self._greeting, self._say = grid, clients, greeting, say
        self._known: dict[int, Node | None] = {}  # by node id, in the order of their answers; None: of no use
        self._questions: dict[int, tuple[str, float]] = {}  # by node id: the message, and until when it counts
        self._ids: dict[int, int] = {}  # client → node id
        self._left_out: dict[int, str] = {}  # clients that take no part, and why
        self._refused = ""  # why a node is of no use, the last time

    def __getitem__(self, client: int) -> int | None:
        """Return the node of a client, if it is connected and takes part."""
        return None if self._objection(client) else self._ids.get(client)

    def why_not(self, client: int) -> str:
        return self._objection(client) or "it is not connected"

    def _objection(self, client: int) -> str:
        node = self._known.get(self._ids.get(client, 0))
        return self._left_out.get(client) or (printable(node.problem) if node else "")

    def leave_out(self, clients: Mapping[int, str]) -> None:
        self._left_out = dict(clients)
        for client, reason in clients.items():
            self._say(f"client {client} takes no part: {reason}")

    def introduced(self) -> dict[int, Node]:
        return {client: node for client in self._ids if (node := self._known[self._ids[client]])}

    def refresh(self) -> None:
        """See which nodes are connected, ask the new ones who they are, and read the answers that have come so far."""
        present = set(self._grid.get_node_ids())
        # Who comes back may have other data, or be another client: it is asked again.
        self._known = {node_id: node for node_id, node in self._known.items() if node_id in present}
        now = time.monotonic()
        self._questions = {n: q for n, q in self._questions.items() if n in present and now < q[1]}
        self._ask(sorted(present - set(self._known) - set(self._questions)))
        for node_id in list(self._questions):
            self._hear(node_id)
        self._ids = {}
        for node_id, node in self._known.items():
            if node is not None:
                self._ids.setdefault(node.client, node_id)

    def wait(self, count: int, patience: float) -> None:
        """Wait until `count` clients are connected, or none has come for `patience` seconds."""
        said, until = -1, time.monotonic() + patience
        while True:
            self.refresh()
            if len(self._ids) >= count or time.monotonic() >= until:
                return
            if len(self._ids) != said:
                said, until = len(self._ids), time.monotonic() + patience
                self._say(f"waiting for clients: {said} of {count} are connected")
            time.sleep(PAUSE)

    def require_all(self, patience: float) -> None:
        self.wait(self._clients, patience)
        if missing := sorted(set(range(self._clients)) - set(self._ids)):
            listed = ", ".join(map(str, missing[:10])) + (" …" if len(missing) > 10 else "")
            raise FedhmError(
                f"{len(missing)} of {self._clients} clients did not connect within {patience:g} s (engine.patience): "
                f"no SuperNode has partition-id {listed}" + (f"; {self._refused}" if self._refused else "")
            )

    def _ask(self, nodes: list[int]) -> None:
        questions = [Message(self._greeting, node_id, MessageType.QUERY, ttl=ANSWER_WITHIN) for node_id in nodes]
        until = time.monotonic() + ANSWER_WITHIN
        for node_id, message_id in zip(nodes, push(self._grid, questions) if nodes else [], strict=True):
            if message_id:
                self._questions[node_id] = message_id, until

    def _hear(self, node_id: int) -> None:
        message_id, _ = self._questions[node_id]
        try:
            reply = pull(self._grid, message_id)
            if reply is None:
                return
            del self._questions[node_id]
            if reply.has_error() and reply.error.code not in BY_THE_APP:
                return  # it did not get to answer: it is asked again
            self._known[node_id] = self._introduce(node_id, reply)
        except UnreadableError as error:
            del self._questions[node_id]
            self._known[node_id] = None
            self._refuse(node_id, str(error))

    def _introduce(self, node_id: int, reply: Message) -> Node | None:
        try:
            if reply.has_error():
                raise ValueError(describe(reply))
            node = Node.read(reply.content)
            if not 0 <= node.client < self._clients:
                raise ValueError(f"it calls itself client {node.client}, but there are {self._clients}, from 0")
        except Exception as error:  # whatever a node may have answered
            self._refuse(node_id, str(error))
            return None
        if node.problem:
            self._say(f"client {node.client} takes no part: {printable(node.problem)}")
        if any(other is not None and other.client == node.client for other in self._known.values()):
            self._say(f"client {node.client} is connected already: node {node_id} waits until it is gone")
        return node

    def _refuse(self, node_id: int, reason: str) -> None:
        self._refused = f"node {node_id} is not used: {printable(reason)}"
        self._say(self._refused)
