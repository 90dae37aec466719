"""Messages by Flower's grid, one at a time, so that one client's broken reply costs nobody else's."""

import hashlib
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message_type import MessageType
from flwr.serverapp import Grid

from fedhm.data.input_spec import InputSpec
from fedhm.errors import FedhmError
from fedhm.flower.wire import NOTE
from fedhm.machine.printable import printable
from fedhm.runs.identities import Identities

REASONS = {
    1: "its ClientApp cannot be loaded",
    2: "its ClientApp raised an exception",
    3: "the time for its answer was over",
    4: "its answer got lost",
    5: "it is not connected any more",
    7: "it could not get the app",
    8: "its process died",
}  # by Flower's error code
BY_THE_APP = (0, 1, 2)


class UnreadableError(Exception):
    """A reply that has come but cannot be read."""


def push(grid: Grid, messages: Sequence[Message]) -> list[str | None]:
    """Send messages and return the ids under which their replies will come; None for what could not be sent."""
    ids: list[str | None] = [message_id or None for message_id in grid.push_messages(messages)]
    return ids + [None] * (len(messages) - len(ids))


def pull(grid: Grid, message_id: str) -> Message | None:
    """Return the reply to one message, if it has come. Whose it is follows from the message, not from what it says."""
    try:
        replies = list(grid.pull_messages([message_id]))
    except httpx.HTTPError:  # it is the SuperLink that does not answer
        raise
    except Exception as error:  # whatever Flower raises over bytes that a client made
        raise UnreadableError(f"it cannot be read ({type(error).__name__})") from error
    return replies[0] if replies else None


def describe(reply: Message) -> str:
    """Return why a reply is an error, in a clause."""
    reason = REASONS.get(reply.error.code, f"Flower reports error {reply.error.code}")
    if reply.error.code not in BY_THE_APP or not reply.error.reason:
        return reason
    # what the app raised stands in <'…'>, perhaps behind Flower's own words
    raised = reply.error.reason.partition(":<'")[2] or reply.error.reason
    lines = (raised.partition("Message: ")[2] or raised).removesuffix("'>").strip().splitlines()
    return f"{reason}: {printable(lines[0])}" if lines else reason


# Which of Flower's nodes is which client. Their ids say nothing of it, so nodes are asked.

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
    device: str = ""  # the content of its device file, in place of a tier
    inputs: str = ""  # what its inputs are like, if that is all that it was asked for

    def introduction(self) -> RecordDict:
        return RecordDict({NOTE: ConfigRecord({**vars(self)})})

    @classmethod
    def read(cls, content: RecordDict) -> "Node":
        """Read what a node says of itself; raise if it is not of this form."""
        note: dict[str, Any] = dict(content.config_records[NOTE])
        node = cls(**note)
        numbers = (node.client, node.samples, node.memory, node.tests)
        if not all(type(number) is int for number in numbers) or not all(
            isinstance(text, str) for text in (node.tier, node.problem, node.device, node.inputs)
        ):
            raise ValueError("its answer holds values of wrong types")
        if node.samples < (0 if node.problem else 1) or node.memory < 0 or node.tests < 0:
            raise ValueError(
                f"it claims {node.samples} samples, {node.tests} test samples and {node.memory} bytes of memory"
            )
        if node.inputs:
            InputSpec.read(node.inputs)
        return node


def fingerprint(public_key: bytes) -> str:
    """Return the fingerprint of a node's key, as `ssh-keygen -l` shows it; empty for simulated nodes, which have none.

    In place of a key they have random bytes.
    """
    try:
        line = load_pem_public_key(public_key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    except (ValueError, UnsupportedAlgorithm):
        return ""
    return "SHA256:" + b64encode(hashlib.sha256(b64decode(line.split()[1])).digest()).decode().rstrip("=")


class Roster:
    """Clients and the nodes behind them. Nobody waits for a node that does not answer, except at the start.

    A client's number belongs to the key of the node that was the first to claim it (`identities`); the SuperLink says
    which key a node has, and has seen it sign. Where nodes have no keys that last, `identities` is None, and of several
    that call themselves the same client the first counts for as long as it is connected: Flower takes a SuperNode that
    was killed for connected for another minute, in which the one that was started in its place waits.
    """

    def __init__(
        self,
        grid: Grid,
        clients: int,
        greeting: RecordDict,
        say: Callable[[str], None],
        identities: Identities | None = None,
    ) -> None:
        self._grid, self._clients, self._greeting, self._say = grid, clients, greeting, say
        self._identities, self._keys = identities, dict[int, str]()  # by node id
        self._too_much: Callable[[Node], str] = lambda _: ""
        self._known: dict[int, Node | None] = {}  # by node id, in the order of their answers; None: of no use
        self._questions: dict[int, tuple[str, float]] = {}  # by node id: the message, and until when it counts
        self._ids: dict[int, int] = {}  # client → node id
        self._left_out: dict[int, str] = {}  # clients that take no part, and why
        self._refusals: list[str] = []  # why nodes are of no use; each is said once, however often a node comes back

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

    def hold_to(self, too_much: Callable[[Node], str]) -> None:
        """From now on leave out nodes that claim what `too_much` objects to."""
        self._too_much = too_much

    def introduced(self) -> dict[int, Node]:
        return {client: node for client in self._ids if (node := self._known[self._ids[client]])}

    def refresh(self) -> None:
        """See which nodes are connected, ask the new ones who they are, and read the answers that have come so far."""
        self._keys = {info.node_id: fingerprint(info.public_key) for info in self._grid.get_nodes()}
        present = set(self._keys)
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

    def gather(self, patience: float, all_of_them: bool) -> None:
        """Wait for all clients; where not all are needed, as of a run that is resumed, others may come back later."""
        if all_of_them:
            self.require_all(patience)
        else:
            self.wait(self._clients, patience)

    def require_all(self, patience: float) -> None:
        self.wait(self._clients, patience)
        if missing := sorted(set(range(self._clients)) - set(self._ids)):
            listed = ", ".join(map(str, missing[:10])) + (" …" if len(missing) > 10 else "")
            raise FedhmError(
                f"{len(missing)} of {self._clients} clients did not connect within {patience:g} s (engine.patience): "
                f"no SuperNode has partition-id {listed}" + (f"; {self._refusals[-1]}" if self._refusals else "")
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
        key = self._keys[node_id]
        if self._identities is not None and key and (objection := self._identities.claim(node.client, key)):
            self._refuse(node_id, objection)
            return None
        node = replace(node, problem=node.problem or self._too_much(node))
        if node.problem:
            self._say(f"client {node.client} takes no part: {printable(node.problem)}")
        if any(other is not None and other.client == node.client for other in self._known.values()):
            self._say(f"client {node.client} is connected already: node {node_id} waits until it is gone")
        return node

    def _refuse(self, node_id: int, reason: str) -> None:
        sentence = f"node {node_id} is not used: {printable(reason)}"
        if sentence not in self._refusals:
            self._refusals.append(sentence)
            self._say(sentence)
