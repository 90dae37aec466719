"""Flower's nodes: which client each of them is, and which tier it gets.

A node's id is random, so the server asks each node to introduce itself (`Node`) and keeps the answers (`NodeRegistry`).
Messages are sent and fetched one at a time, so that one client's broken reply costs no other client's.
"""

import hashlib
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message_type import MessageType
from flwr.serverapp import Grid

from fedhm.config.schema import (
    NO_TIER,
    Config,
    DeviceConfig,
    DeviceProfile,
    FederationConfig,
    ResolvedConfig,
    fixed_level,
    parse_profile,
)
from fedhm.data.input_spec import InputSpec
from fedhm.errors import FedhmError
from fedhm.flower.wire import JSON_RECORD, RunInfo
from fedhm.machine.printable import printable
from fedhm.methods.method import AnyMethod
from fedhm.runs.identities import Identities
from fedhm.server.filters.filter import RoundFilter
from fedhm.server.filters.fleet import TierWork, checkpointing_modes, largest_tier_within, profile_mismatch
from fedhm.work.messages import Participant

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
LONGEST_TEXT = 1 << 16  # characters of a tier or a device file; a device file of ten tiers has about 10,000
MOST_MEMORY = 1 << 60  # bytes that a device can have in the settings: more than any device has


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
        if max(len(node.tier), len(node.device)) > LONGEST_TEXT:  # the server keeps both for the whole run
            problem = f"its tier or device file has more than {LONGEST_TEXT} characters"
            node = replace(node, tier="", device="", problem=node.problem or problem)
        return replace(node, problem=printable(node.problem))


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
    """Clients and their nodes. Only the start of a run waits for nodes that do not answer; later ones join a round.

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
        self.read_answers()
        self._node_ids = {}
        for node_id, node in self._answers.items():
            if node is not None:
                self._node_ids.setdefault(node.client, node_id)

    def read_answers(self) -> None:
        """Read the introductions that have arrived. They count from the next `refresh` on.

        The engine calls this while it waits for a round: Flower keeps an answer no longer than `ANSWER_TIMEOUT`.
        """
        for node_id in list(self._questions):
            self._read_answer(node_id)

    def wait(self, patience: float) -> None:
        """Wait until all clients are connected, or no other client has connected for `patience` seconds.

        A client that comes and goes does not count again: it could hold up the start for ever.
        """
        most, until = -1, time.monotonic() + patience
        while True:
            self.refresh()
            if len(self._node_ids) >= self._clients or time.monotonic() >= until:
                return
            if len(self._node_ids) > most:
                most, until = len(self._node_ids), time.monotonic() + patience
                self._say(f"waiting for clients: {most} of {self._clients} are connected")
            time.sleep(POLL_SECONDS)

    def wait_for(self, least: int, patience: float) -> None:
        """Wait for all clients, and raise if fewer than `least` are connected then."""
        self.wait(patience)
        if len(self._node_ids) < least:
            raise FedhmError(
                f"{self._clients - len(self._node_ids)} of {self._clients} clients did not connect within {patience:g} "
                f"s (engine.patience), and a run begins with at least {least} (federation.min_clients): "
                f"{self._missing_ids()}" + (f"; {self._refusals[-1]}" if self._refusals else "")
            )

    def report_missing(self) -> None:
        """Say which clients a run begins without."""
        if missing := self._clients - len(self._node_ids):
            self._say(
                f"the run begins without {missing} of {self._clients} clients, which may join later: "
                f"{self._missing_ids()}"
            )

    def _missing_ids(self) -> str:
        missing = sorted(set(range(self._clients)) - set(self._node_ids))
        return "no SuperNode has partition-id " + ", ".join(map(str, missing[:10])) + " …" * (len(missing) > 10)

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
        try:
            node = replace(node, problem=node.problem or self._tier_objection(node))
        except Exception as error:  # a node's wish is not worth the run of all others
            self._refuse(node_id, f"its introduction cannot be used ({type(error).__name__}: {error})")
            return None
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


# ---- tiers: by the server's settings, or for each client by its own introduction ----


@dataclass(frozen=True)
class TierChoice:
    """The tier that a client gets by its own introduction."""

    tier: str
    checkpointing: bool = False  # it trains with checkpointing, which the settings do not ask of all clients
    problem: str = ""  # why it takes no part
    profile: DeviceProfile | None = None  # the content of its device file, if that is of use here


@dataclass(frozen=True)
class TierAssignment:
    federation: FederationConfig  # with the tiers of the clients
    refused: dict[int, str]  # clients that take no part, with the reason


class TierChooser:
    """Chooses the tier of a client by its introduction. Other clients' introductions have no influence on it.

    digest  identifies the model that device files must have been measured with
    """

    def __init__(self, config: Config, work: TierWork, digest: str) -> None:
        self._config, self._work, self._digest = config, work, digest

    def by_number(self, client: int) -> TierChoice:
        """Return the tier of a client that says nothing."""
        levels = self._work.levels
        return TierChoice(levels[fixed_level(client, len(levels))])

    def choose(self, node: Node) -> TierChoice:
        """Return the tier that a client names, the largest that fits its memory or device, or that of its number."""
        if node.tier and node.device:
            return self._refused("it names both a tier and a device file: only one of them can decide")
        if node.tier:
            known = node.tier in (*self._work.tiers, *self._work.levels)
            return TierChoice(node.tier) if known else self._refused(_unknown_tier(node, self._work.tiers))
        if not node.device:
            return self._fitting(node, None) if node.memory else self.by_number(node.client)
        try:
            profile = parse_profile(node.device, "what it sent")
            reason = profile_mismatch(profile, self._digest, self._config.train)
        except FedhmError as error:
            reason = str(error)
        if reason:
            return self._refused(f"its device file is of no use here: {printable(reason)}")
        return self._fitting(node, profile)

    def _refused(self, problem: str) -> TierChoice:
        return TierChoice(self._work.tiers[-1], problem=problem)

    def _fitting(self, node: Node, profile: DeviceProfile | None) -> TierChoice:
        """Return the largest tier that fits a client's memory, as the plan of a fleet has it."""
        work, for_all = self._work, bool(self._config.train.checkpointing)
        memory = node.memory or (profile.memory if profile else None)
        if found := largest_tier_within(memory, work, for_all, profile):
            tier, checkpointing = found
            return TierChoice(tier, checkpointing and not for_all, profile=profile)
        if self._config.federation.unfit == "smallest" and set(work.levels) <= set(work.tiers):
            return TierChoice(work.tiers[-1], profile=profile)
        options = [(tier, mode) for tier in work.tiers for mode in checkpointing_modes(work, for_all)]
        size, smallest = min((work.memory(*option, profile), option[0]) for option in options)
        problem = (
            f"it can spare {(memory or 0) >> 20} MiB, but training even tier {smallest} takes {-(-size >> 20)} MiB "
            f"with train.batch = {self._config.train.batch}"
        )
        return TierChoice(NO_TIER if profile else work.tiers[-1], problem=problem, profile=profile)


def settings_decide(config: Config) -> bool:
    """Tell whether the server's settings give each client its tier. Then no node's wish changes a tier."""
    federation = config.federation
    by_tier = config.data is not None and config.data.partition == "by-tier"  # samples follow the tiers of the numbers
    return bool(federation.given_tiers or federation.devices or federation.heterogeneity == "dynamic" or by_tier)


def assign_tiers(config: Config, chooser: TierChooser, nodes: Mapping[int, Node]) -> TierAssignment:
    """Give each client the tier of its own introduction, unless the server's settings decide.

    If some clients have a device file, rounds have simulated time. Then all clients are listed as devices, and clients
    without a file as devices of usual speed.
    """
    federation = config.federation
    if settings_decide(config):
        return TierAssignment(federation, {})
    choices = {
        client: chooser.choose(nodes[client]) if client in nodes else chooser.by_number(client)
        for client in range(federation.clients)
    }
    refused = {client: choice.problem for client, choice in choices.items() if choice.problem}
    tiers = tuple(choice.tier for choice in choices.values())
    if set(tiers) == {NO_TIER}:  # clients that are missing have the tiers of their numbers
        raise FedhmError(f"no client can train: {refused[0]}")
    changes: dict[str, Any] = {
        "checkpointed": tuple(client for client, choice in choices.items() if choice.checkpointing),
        "missing": tuple(client for client in choices if client not in nodes),
    }
    if any(choice.profile for choice in choices.values()):
        unfit = "leave-out" if federation.unfit == "refuse" else federation.unfit  # one node must not stop the others
        changes |= {"devices": _devices(choices, nodes), "plan": tiers, "unfit": unfit}
    elif any(node.tier or node.memory for node in nodes.values()):
        changes["assignment"] = tiers
    return TierAssignment(federation.model_copy(update=changes), refused)


def _devices(choices: Mapping[int, TierChoice], nodes: Mapping[int, Node]) -> tuple[DeviceConfig, ...]:
    """Return the devices of all clients. Clients with equal descriptions form one device."""
    groups: dict[tuple[int, DeviceProfile | None], list[int]] = {}
    for client, choice in choices.items():
        memory = min(nodes[client].memory, MOST_MEMORY) if client in nodes else 0
        groups.setdefault((memory, choice.profile), []).append(client)
    return tuple(
        DeviceConfig(
            name=f"{printable(profile.name, 40) if profile else 'device'} {number}",
            clients=tuple(clients),
            memory=memory or None,
            profile=profile,
        )
        for number, ((memory, profile), clients) in enumerate(groups.items(), start=1)
    )


def tier_objection(config: Config, method: AnyMethod, node: Node, given: str = "") -> str:
    """Return why a client may not have the tier that it names, because a smaller one was given; empty if it may.

    The given tier is that of the server's settings, of its first introduction, or of its number. Memory names no tier:
    it was measured when the run began.

    given  the tier that a late client was given
    """
    if not node.tier or config.federation.heterogeneity == "dynamic":
        return ""
    order = tuple(dict.fromkeys([*method.levels, *method.tiers]))  # largest first
    if node.tier not in order:
        return _unknown_tier(node, method.tiers)
    by_number = method.levels[fixed_level(node.client, len(method.levels))]
    at_start = config.federation.given_tiers[node.client] if config.federation.given_tiers else by_number
    given = given or at_start
    if given == NO_TIER:
        return f"it asks for tier {node.tier}, but no tier fits its device"
    if order.index(node.tier) >= order.index(given):
        return ""
    return f"it asks for tier {node.tier}, but was given {given}, which is smaller"


class LateClients(RoundFilter):
    """Clients that were missing when the run began. Their first introduction gives them a tier, as at the start.

    Until then they are sampled at the tiers of their numbers, and their tasks fail because they are not connected.
    """

    def __init__(self, config: ResolvedConfig, method: AnyMethod, chooser: TierChooser, registry: NodeRegistry) -> None:
        self._config, self._method, self._chooser, self._registry = config, method, chooser, registry
        self._choices: dict[int, TierChoice] = {}  # of late clients that have come

    def objection(self, node: Node) -> str:
        """Return why a node takes no part; choose its tier if it is a late client that comes for the first time."""
        if node.client not in self._config.federation.missing or node.client in self._choices:
            given = self._choices.get(node.client)
            return tier_objection(self._config, self._method, node, given.tier if given else "")
        choice = self._chooser.choose(node)
        if not choice.problem:
            self._choices[node.client] = choice
        return choice.problem

    def sampling(self, attempts: Iterator[list[Participant]], round_number: int) -> Iterator[list[Participant]]:  # noqa: ARG002
        return self.reachable(attempts)

    def reachable(self, attempts: Iterator[list[Participant]]) -> Iterator[list[Participant]]:
        """Yield the attempts that reach a connected client, at the tiers that late clients were given.

        An attempt that reaches nobody would be lost. If no attempt reaches anybody, the run needs one for its reasons.
        """
        self._registry.refresh()
        absent: set[int] = set()
        unreached: list[Participant] | None = None
        for chosen in attempts:
            reached = any(self._registry.node_id(participant.client) is not None for participant in chosen)
            absent.update(participant.client for participant in chosen)
            if reached or len(absent) == self._config.federation.clients:
                unreached = None
                yield self._at_own_tiers(chosen)
            else:
                unreached = chosen
        if unreached is not None:  # of a private round, which has one attempt, or of the last clients that may evaluate
            yield self._at_own_tiers(unreached)

    def _at_own_tiers(self, chosen: Sequence[Participant]) -> list[Participant]:
        late = {client: choice.tier for client, choice in self._choices.items()}
        return [Participant(each.client, late.get(each.client, each.tier)) for each in chosen]

    def with_checkpointing(self, info: RunInfo) -> RunInfo:
        """Return the description of the run with the late clients that train with checkpointing."""
        late = [client for client, choice in self._choices.items() if choice.checkpointing]
        if not late:
            return info
        federation = info.config.federation
        changes = {"checkpointed": tuple(sorted({*federation.checkpointed, *late}))}
        config = info.config.model_copy(update={"federation": federation.model_copy(update=changes)})
        return replace(info, config=config)


def _unknown_tier(node: Node, tiers: Sequence[str]) -> str:
    return f"it asks for tier '{printable(node.tier)}', known are {', '.join(tiers)}"
