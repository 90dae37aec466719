"""The Flower engine: each client's tasks go to its node as one message, and replies come back in any order."""

import reprlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from flwr.app import Message
from flwr.app.message_type import MessageType
from flwr.serverapp import Grid

from fedhm.flower.nodes import LateClients, NodeRegistry, UnreadableReplyError, describe_error, pull, push
from fedhm.flower.wire import RunInfo, TaskEncoder, bytes_by_task, decode_replies, unreadable_reason
from fedhm.work.messages import Failure, Reply, Task, Update
from fedhm.work.work import work_of

SHORTEST_POLL, LONGEST_POLL = 0.1, 1.0  # seconds between two looks for replies; longer when none has come for a while
PUSH_BATCH = 8  # messages that are pushed at once
# How many of the oldest outstanding replies are fetched. Updates are merged in the order of their tasks, so later
# replies stay with the SuperLink, and the server's memory does not grow with the number of clients.
FETCH_AHEAD = 32
REPLY_RETENTION = 600.0  # seconds beyond the deadline for which Flower keeps replies


@dataclass(frozen=True)
class ClientTasks:
    """The tasks of one client in an exchange, with their positions in the round's list."""

    client: int
    tasks: list[Task]
    positions: list[int]
    down: list[int]  # bytes sent for each task

    def failed(self, reason: str, sent: bool = True) -> Iterator[Reply]:
        down = self.down if sent else [0] * len(self.tasks)
        for position, size in zip(self.positions, down, strict=True):
            yield Failure(self.client, reason, position, down=size, up=0)


class FlowerEngine:
    """An engine on Flower's nodes. A client that fails, dies or is late costs only its own replies."""

    def __init__(
        self,
        grid: Grid,
        registry: NodeRegistry,
        info: RunInfo,
        deadline: float,
        fp16: bool,
        late: LateClients | None = None,
    ) -> None:
        self._grid, self._registry, self._info = grid, registry, info
        self._deadline, self._fp16, self._late = deadline, fp16, late

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        until = time.monotonic() + (self._deadline or float("inf"))
        self._registry.refresh()
        info = self._late.with_checkpointing(self._info) if self._late else self._info
        encoder = TaskEncoder(info, self._fp16)
        waiting: dict[str, ClientTasks] = {}  # by message id
        outgoing: list[tuple[Message, ClientTasks]] = []
        for client, numbered in _by_client(tasks).items():
            own_tasks = [task for _, task in numbered]
            content = encoder.encode(own_tasks)
            positions = [position for position, _ in numbered]
            sent = ClientTasks(client, own_tasks, positions, bytes_by_task(content, len(own_tasks)))
            node = self._registry.node_id(client)
            if node is None:
                yield from sent.failed(self._registry.absence_reason(client), sent=False)
                continue
            ttl = self._deadline + REPLY_RETENTION if self._deadline else None
            outgoing.append((Message(content, node, MessageType.TRAIN, ttl=ttl), sent))
            if len(outgoing) == PUSH_BATCH:
                yield from self._push(outgoing, waiting)
                outgoing = []
        yield from self._push(outgoing, waiting)
        del encoder  # with the records that clients shared
        yield from self._replies(waiting, until)

    def close(self) -> None:
        """Do nothing: the nodes belong to Flower."""

    def _push(self, outgoing: list[tuple[Message, ClientTasks]], waiting: dict[str, ClientTasks]) -> Iterator[Reply]:
        """Send messages and note the ids of their replies to come; yield failures for messages that cannot be sent."""
        ids = push(self._grid, [message for message, _ in outgoing]) if outgoing else []
        for message_id, (_, sent) in zip(ids, outgoing, strict=True):
            if message_id:
                waiting[message_id] = sent
            else:
                yield from sent.failed("its task could not be sent", sent=False)

    def _replies(self, waiting: dict[str, ClientTasks], until: float) -> Iterator[Reply]:
        pause = SHORTEST_POLL
        while waiting and time.monotonic() < until:
            before = len(waiting)
            for message_id in list(waiting)[:FETCH_AHEAD]:
                yield from self._fetch(message_id, waiting)
            self._registry.read_answers()
            pause = min(1.3 * pause, LONGEST_POLL) if len(waiting) == before else SHORTEST_POLL
            if waiting:
                time.sleep(min(pause, max(0.0, until - time.monotonic())))
        for message_id in list(waiting):  # replies that were in time, but behind others that were not
            yield from self._fetch(message_id, waiting)
        for late in waiting.values():
            yield from late.failed(f"it did not answer within {self._deadline:g} s (engine.deadline)")

    def _fetch(self, message_id: str, waiting: dict[str, ClientTasks]) -> Iterator[Reply]:
        """Yield the replies to the tasks of one message, if they have come, and wait for it no longer."""
        try:
            message = pull(self._grid, message_id)
        except UnreadableReplyError as error:
            yield from waiting.pop(message_id).failed(str(error))
            return
        if message is not None:
            yield from self._decode(message, waiting.pop(message_id))

    def _decode(self, message: Message, sent: ClientTasks) -> list[Reply]:
        """Return the replies in a message. Whatever the client wrote costs only the replies to its own tasks."""
        try:
            if message.has_error():
                return list(sent.failed(describe_error(message)))
            up = bytes_by_task(message.content, len(sent.tasks))
            replies = decode_replies(message.content, sent.tasks, self._fp16)
            replies = [self._check_samples(reply, task) for reply, task in zip(replies, sent.tasks, strict=True)]
        except Exception as error:
            return list(sent.failed(unreadable_reason(error)))
        return [
            replace(reply, position=position, down=down, up=received)
            for reply, position, down, received in zip(replies, sent.positions, sent.down, up, strict=True)
        ]

    def _check_samples(self, reply: Reply, task: Task) -> Reply:
        """Return the reply, or a failure if it claims another number of samples than its client introduced itself with.

        That number is the client's weight in the mean and in pooled metrics. It was given before the client saw a task.
        """
        node = self._registry.connected().get(task.client)
        if node is None or not isinstance(reply, Update):
            return reply
        known, what = (node.tests, "test samples") if work_of(task.kind).tests else (node.samples, "samples")
        if reply.samples == known:
            return reply
        return Failure(task.client, f"it claims {reprlib.repr(reply.samples)} {what}, but said that it has {known}")


def _by_client(tasks: Iterable[Task]) -> dict[int, list[tuple[int, Task]]]:
    grouped: dict[int, list[tuple[int, Task]]] = {}
    for position, task in enumerate(tasks):
        grouped.setdefault(task.client, []).append((position, task))
    return grouped
