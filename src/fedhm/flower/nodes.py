"""Flower's nodes: which client each of them is, and which tier it gets.

A node's id is random, so the server asks each node to introduce itself (`Node`) and keeps the answers (`NodeRegistry`).
Messages are sent and fetched one at a time, so that one client's broken reply costs no other client's.
"""

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

from fedhm.config.schema import Config, DeviceConfig, FederationConfig, fixed_level, parse_profile
from fedhm.data.input_spec import InputSpec
from fedhm.errors import FedhmError
from fedhm.flower.wire import JSON_RECORD
from fedhm.machine.printable import printable
from fedhm.methods.method import AnyMethod
from fedhm.runs.identities import Identities
from fedhm.server.filters.fleet import TierWork, checkpointing_modes, largest_tier_within, profile_mismatch

# ---- messages ----

ERROR_REASONS = {
    1: "its ClientApp cannot be loaded",
    2: "its ClientApp raised an exception",
    3: "it did not answer in time",
    4: "its answer got lost",
    5: "it is not connected any more",
    7: "it could not get the app",
    8: "its process died",
}  # by Flower's error code
APP_ERRORS = (0, 1, 2)  # the codes of errors in the app itself; the others mean that it did not get to answer


class UnreadableReplyError(Exception):
    """A reply has arrived, but Flower cannot read it."""


def push(grid: Grid, messages: Sequence[Message]) -> list[str | None]:
    """Send messages and return the ids of their replies to come; None for each message that could not be sent."""
    ids: list[str | None] = [message_id or None for message_id in grid.push_messages(messages)]
    return ids + [None] * (len(messages) - len(ids))


def pull(grid: Grid, message_id: str) -> Message | None:
    """Return the reply to one message, if it has arrived. The message tells whose reply it is, not its content."""
    try:
        replies = list(grid.pull_messages([message_id]))
    except httpx.HTTPError:  # the SuperLink does not answer
        raise
    except Exception as error:  # a client's bytes can make Flower raise anything
        raise UnreadableReplyError(f"it cannot be read ({type(error).__name__})") from error
    return replies[0] if replies else None


def describe_error(reply: Message) -> str:
    """Return the reason of an error reply, as a clause."""
    reason = ERROR_REASONS.get(reply.error.code, f"Flower reports error {reply.error.code}")
    if reply.error.code not in APP_ERRORS or not reply.error.reason:
        return reason
    # the app's own words stand in <'…'>, perhaps behind Flower's
    raised = reply.error.reason.partition(":<'")[2] or reply.error.reason
    lines = (raised.partition("Message: ")[2] or raised).removesuffix("'>").strip().splitlines()
    return f"{reason}: {printable(lines[0])}" if lines else reason


# ---- introductions ----

ANSWER_TIMEOUT = 120.0  # seconds that a node has to introduce itself before it is asked again
POLL_SECONDS = 0.5  # between two looks while the server waits for nodes


@dataclass(frozen=True)
class Node:
    """A node's description of itself. Its fields travel as they are named here."""

    client: int  # its number, from 0
    samples: int
    tier: str = ""  # the tier that it can afford,
    memory: int = 0  # or the bytes that it can spare for training; with neither, the server chooses
    problem: str = ""  # why it cannot take part
    tests: int = 0  # how many test samples it has, beside its other samples
    device: str = ""  # the content of its device file, in place of a tier
    inputs: str = ""  # the form of its inputs, if the server asks for nothing else

    def encode(self) -> RecordDict:
        return RecordDict({JSON_RECORD: ConfigRecord({**vars(self)})})

    @classmethod
    def decode(cls, content: RecordDict) -> "Node":
        """Read a node's introduction; raise if it is malformed."""
        values: dict[str, Any] = dict(content.config_records[JSON_RECORD])
        node = cls(**values)
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
    """Return the fingerprint of a node's key, as `ssh-keygen -l` shows it.

    It is empty for simulated nodes: these have random bytes in place of a key.
    """
    try:
        line = load_pem_public_key(public_key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    except (ValueError, UnsupportedAlgorithm):
        return ""
    return "SHA256:" + b64encode(hashlib.sha256(b64decode(line.split()[1])).digest()).decode().rstrip("=")


class NodeRegistry:
    """Clients and their nodes. Only the start of a run waits for nodes that do not answer.

    With `identities`, a client's number belongs to the key of the first node that claimed it. The SuperLink knows the
    key of each node and has verified its signature.

    Without `identities`, for nodes whose keys do not last, the first of several nodes with the same number counts
    while it is connected. Flower lists a killed SuperNode for another minute, and its replacement waits for that time.
    """

    def __init__(
        self,
        grid: Grid,
        clients: int,
        request: RecordDict,
        say: Callable[[str], None],
        identities: Identities | None = None,
    ) -> None:
        self._grid, self._clients, self._request, self._say = grid, clients, request, say
        self._identities, self._keys = identities, dict[int, str]()  # fingerprints by node id
        self._tier_objection: Callable[[Node], str] = lambda _: ""
        self._answers: dict[int, Node | None] = {}  # by node id, in the order of arrival; None: unusable
        self._questions: dict[int, tuple[str, float]] = {}  # by node id: the message id, and when it expires
        self._node_ids: dict[int, int] = {}  # by client
        self._excluded: dict[int, str] = {}  # clients that take no part, with the reason
        self._refusals: list[str] = []  # each is printed once, however often a node reconnects

    def node_id(self, client: int) -> int | None:
        """Return the node of a client, if it is connected and takes part."""
        return None if self._exclusion(client) else self._node_ids.get(client)

    def absence_reason(self, client: int) -> str:
        return self._exclusion(client) or "it is not connected"

    def _exclusion(self, client: int) -> str:
        node = self._answers.get(self._node_ids.get(client, 0))
        return self._excluded.get(client) or (printable(node.problem) if node else "")

    def exclude(self, clients: Mapping[int, str]) -> None:
        """Leave clients out of the run, each for a reason."""
        self._excluded = dict(clients)
        for client, reason in clients.items():
            self._say(f"client {client} takes no part: {reason}")

    def check_tiers(self, objection: Callable[[Node], str]) -> None:
        """From now on leave out nodes whose tier `objection` gives a reason against."""
        self._tier_objection = objection

    def connected(self) -> dict[int, Node]:
        """Return the introductions of the connected clients."""
        return {client: node for client in self._node_ids if (node := self._answers[self._node_ids[client]])}

    def refresh(self) -> None:
        """Look up the connected nodes, ask the new ones to introduce themselves, and read the answers so far."""
        self._keys = {info.node_id: fingerprint(info.public_key) for info in self._grid.get_nodes()}
        present = set(self._keys)
        # A node that reconnects is asked again: it may have other data by now, or be another client.
        self._answers = {node_id: node for node_id, node in self._answers.items() if node_id in present}
        now = time.monotonic()
        self._questions = {n: q for n, q in self._questions.items() if n in present and now < q[1]}
        self._ask(sorted(present - set(self._answers) - set(self._questions)))
        for node_id in list(self._questions):
            self._read_answer(node_id)
        self._node_ids = {}
        for node_id, node in self._answers.items():
            if node is not None:
                self._node_ids.setdefault(node.client, node_id)

    def wait(self, patience: float) -> None:
        """Wait until all clients are connected, or no other client has connected for `patience` seconds."""
        shown, until = -1, time.monotonic() + patience
        while True:
            self.refresh()
            if len(self._node_ids) >= self._clients or time.monotonic() >= until:
                return
            if len(self._node_ids) != shown:
                shown, until = len(self._node_ids), time.monotonic() + patience
                self._say(f"waiting for clients: {shown} of {self._clients} are connected")
            time.sleep(POLL_SECONDS)

    def wait_for_all(self, patience: float) -> None:
        """Wait for all clients, and raise if some of them do not connect."""
        self.wait(patience)
        if missing := sorted(set(range(self._clients)) - set(self._node_ids)):
            listed = ", ".join(map(str, missing[:10])) + (" …" if len(missing) > 10 else "")
            raise FedhmError(
                f"{len(missing)} of {self._clients} clients did not connect within {patience:g} s (engine.patience): "
                f"no SuperNode has partition-id {listed}" + (f"; {self._refusals[-1]}" if self._refusals else "")
            )

    def _ask(self, nodes: list[int]) -> None:
        questions = [Message(self._request, node_id, MessageType.QUERY, ttl=ANSWER_TIMEOUT) for node_id in nodes]
        until = time.monotonic() + ANSWER_TIMEOUT
        for node_id, message_id in zip(nodes, push(self._grid, questions) if nodes else [], strict=True):
            if message_id:
                self._questions[node_id] = message_id, until

    def _read_answer(self, node_id: int) -> None:
        message_id, _ = self._questions[node_id]
        try:
            reply = pull(self._grid, message_id)
            if reply is None:
                return
            del self._questions[node_id]
            if reply.has_error() and reply.error.code not in APP_ERRORS:
                return  # its app did not get to answer: it is asked again
            self._answers[node_id] = self._validated(node_id, reply)
        except UnreadableReplyError as error:
            del self._questions[node_id]
            self._answers[node_id] = None
            self._refuse(node_id, str(error))

    def _validated(self, node_id: int, reply: Message) -> Node | None:
        try:
            if reply.has_error():
                raise ValueError(describe_error(reply))
            node = Node.decode(reply.content)
            if not 0 <= node.client < self._clients:
                raise ValueError(f"it calls itself client {node.client}, but there are {self._clients}, from 0")
        except Exception as error:  # a node can answer anything
            self._refuse(node_id, str(error))
            return None
        key = self._keys[node_id]
        if self._identities is not None and key and (objection := self._identities.claim(node.client, key)):
            self._refuse(node_id, objection)
            return None
        node = replace(node, problem=node.problem or self._tier_objection(node))
        if node.problem:
            self._say(f"client {node.client} takes no part: {printable(node.problem)}")
        if any(other is not None and other.client == node.client for other in self._answers.values()):
            self._say(f"client {node.client} is connected already: node {node_id} waits until it is gone")
        return node

    def _refuse(self, node_id: int, reason: str) -> None:
        sentence = f"node {node_id} is not used: {printable(reason)}"
        if sentence not in self._refusals:
            self._refusals.append(sentence)
            self._say(sentence)


# ---- tiers: named by a client's node config, or the largest that fits its memory or device file ----


@dataclass(frozen=True)
class TierAssignment:
    federation: FederationConfig  # with the tiers of the clients
    refused: dict[int, str]  # clients without a tier, with the reason


def devices_from_nodes(config: Config, nodes: Mapping[int, Node], digest: str) -> TierAssignment:
    """Make the nodes' device files the devices of the run, if there are any; a file of another model is refused."""
    federation = config.federation
    if federation.devices or not any(node.device for node in nodes.values()):
        return TierAssignment(federation, {})
    refused: dict[int, str] = {}
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}  # clients with equal descriptions form one device
    for client in range(federation.clients):
        node = nodes.get(client, Node(client, 0))
        if node.tier or federation.assignment or federation.heterogeneity == "dynamic":
            raise FedhmError(
                "a client names a device file, but other clients have given or drawn tiers: use one or the other"
            )
        known: dict[str, Any] = {"memory": node.memory} if node.memory else {}
        try:
            profile = parse_profile(node.device, "what it sent") if node.device else None
            reason = profile_mismatch(profile, digest, config.train) if profile else ""
        except FedhmError as error:
            profile, reason = None, str(error)
        if reason:
            refused[client] = f"its device file is of no use here: {printable(reason)}"
        elif profile:
            known["profile"] = profile
        groups.setdefault(f"{reason and client} {node.memory} {node.device}", (known, []))[1].append(client)
    devices = [
        DeviceConfig(name=f"{_device_name(known)} {number}", clients=tuple(clients), **known)
        for number, (known, clients) in enumerate(groups.values(), start=1)
    ]
    unfit = "leave-out" if federation.unfit == "refuse" else federation.unfit  # one node must not stop the others
    return TierAssignment(federation.model_copy(update={"devices": tuple(devices), "unfit": unfit}), refused)


def _device_name(known: Mapping[str, Any]) -> str:
    return printable(known["profile"].name)[:40] if "profile" in known else "device"


def assign_tiers(config: Config, work: TierWork, nodes: Mapping[int, Node]) -> TierAssignment:
    """Give each client the tier that its node names or that fits its memory; refuse it if there is none.

    A client whose node says nothing gets the tier of its number.
    """
    requests = {client: node for client, node in nodes.items() if node.tier or node.memory}
    federation = config.federation
    if not requests or federation.given_tiers or federation.devices or federation.heterogeneity == "dynamic":
        return TierAssignment(federation, {})
    assignment: list[str] = []
    checkpointed: list[int] = []
    refused: dict[int, str] = {}
    for client in range(federation.clients):
        node = requests.get(client)
        if node is None:
            assignment.append(work.levels[fixed_level(client, len(work.levels))])
        elif node.tier and node.tier in (*work.tiers, *work.levels):
            assignment.append(node.tier)
        elif not node.tier and (found := largest_tier_within(node.memory, work, bool(config.train.checkpointing))):
            assignment.append(found[0])
            checkpointed += [client] if found[1] and not config.train.checkpointing else []
        else:
            assignment.append(work.tiers[-1])
            refused[client] = _unknown_tier(node, work.tiers) if node.tier else _too_little_memory(node, work, config)
    changes = {"assignment": tuple(assignment), "checkpointed": tuple(checkpointed)}
    return TierAssignment(federation.model_copy(update=changes), refused)


def tier_objection(config: Config, method: AnyMethod, node: Node) -> str:
    """Return why a client may not have the tier that it names, because a smaller one was given; empty if it may.

    The given tier is that of the server's settings, of its first introduction, or of its number. Memory names no tier:
    it was measured when the run began.
    """
    if not node.tier or config.federation.heterogeneity == "dynamic":
        return ""
    order = tuple(dict.fromkeys([*method.levels, *method.tiers]))  # largest first
    if node.tier not in order:
        return _unknown_tier(node, method.tiers)
    by_number = method.levels[fixed_level(node.client, len(method.levels))]
    given = config.federation.given_tiers[node.client] if config.federation.given_tiers else by_number
    if order.index(node.tier) >= order.index(given):
        return ""
    return f"it asks for tier {node.tier}, but was given {given}, which is smaller"


def _unknown_tier(node: Node, tiers: Sequence[str]) -> str:
    return f"it asks for tier '{printable(node.tier)}', known are {', '.join(tiers)}"


def _too_little_memory(node: Node, work: TierWork, config: Config) -> str:
    ways = [
        (tier, again) for tier in work.tiers for again in checkpointing_modes(work, bool(config.train.checkpointing))
    ]
    size, tier = min((work.memory(tier, again), tier) for tier, again in ways)
    return (
        f"it can spare {node.memory >> 20} MiB, but training even tier {tier} takes {-(-size >> 20)} MiB "
        f"with train.batch = {config.train.batch}"
    )
