"""The Flower engine: tasks go to nodes as messages, one for each client, and replies come back in any order."""

import reprlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from flwr.app import Message
from flwr.app.message_type import MessageType
from flwr.serverapp import Grid

from fedhm.flower.nodes import Roster, UnreadableError, describe, pull, push
from fedhm.flower.wire import Outbox, Terms, read_replies, travelled, unreadable
from fedhm.work.messages import Failure, Reply, Task, Update
from fedhm.work.work import work_of

PAUSES = 0.1, 1.0  # seconds between two looks at what has come: at first, and when nothing comes for long
AT_A_TIME = 8  # messages that are pushed at once
# How far ahead of the first reply that is missing others are fetched. They are merged in the order of their tasks, so
# what is behind stays with the SuperLink, and what the server holds does not grow with the clients.
AHEAD = 32
SPARE = 600.0  # seconds beyond the deadline that Flower keeps replies for


@dataclass(frozen=True)
class Parcel:
    """The tasks of one client in this exchange, with their places in the round's list."""

    client: int
    tasks: list[Task]
    positions: list[int]
    down: list[int]  # bytes, by task

    def failed(self, reason: str, sent: bool = True) -> Iterator[Reply]:
        down = self.down if sent else [0] * len(self.tasks)
        for position, size in zip(self.positions, down, strict=True):
            yield Failure(self.client, reason, position, down=size, up=0)


class FlowerEngine:
    """An engine on Flower's nodes. A client that fails, dies or is late costs only its own replies."""

    def __init__(self, grid: Grid, roster: Roster, terms: Terms, deadline: float, fp16: bool) -> None:
        self._grid, self._roster, self._terms = grid, roster, terms
        self._deadline, self._fp16 = deadline, fp16

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        until = time.monotonic() + (self._deadline or float("inf"))
        self._roster.refresh()
        outbox = Outbox(self._terms, self._fp16)
        waiting: dict[str, Parcel] = {}  # by message id
        outgoing: list[tuple[Message, Parcel]] = []
        for client, numbered in _by_client(tasks).items():
            of_client = [task for _, task in numbered]
            content = outbox.parcel(of_client)
            positions = [position for position, _ in numbered]
            parcel = Parcel(client, of_client, positions, travelled(content, len(of_client)))
            node = self._roster[client]
            if node is None:
                yield from parcel.failed(self._roster.why_not(client), sent=False)
                continue
            ttl = self._deadline + SPARE if self._deadline else None
            outgoing.append((Message(content, node, MessageType.TRAIN, ttl=ttl), parcel))
            if len(outgoing) == AT_A_TIME:
                yield from self._push(outgoing, waiting)
                outgoing = []
        yield from self._push(outgoing, waiting)
        del outbox
        yield from self._replies(waiting, until)

    def close(self) -> None:
        """Do nothing: the nodes are Flower's."""

    def _push(self, outgoing: list[tuple[Message, Parcel]], waiting: dict[str, Parcel]) -> Iterator[Reply]:
        """Send messages and note under which ids their replies will come; yield failures for what cannot be sent."""
        ids = push(self._grid, [message for message, _ in outgoing]) if outgoing else []
        for message_id, (_, parcel) in zip(ids, outgoing, strict=True):
            if message_id:
                waiting[message_id] = parcel
            else:
                yield from parcel.failed("its task could not be sent", sent=False)

    def _replies(self, waiting: dict[str, Parcel], until: float) -> Iterator[Reply]:
        pause = PAUSES[0]
        while waiting and time.monotonic() < until:
            before = len(waiting)
            for message_id in list(waiting)[:AHEAD]:
                yield from self._reply(message_id, waiting)
            pause = min(1.3 * pause, PAUSES[1]) if len(waiting) == before else PAUSES[0]
            if waiting:
                time.sleep(min(pause, max(0.0, until - time.monotonic())))
        for message_id in list(waiting):  # those that were in time, but behind others that were not
            yield from self._reply(message_id, waiting)
        for parcel in waiting.values():
            yield from parcel.failed(f"it did not answer within {self._deadline:g} s (engine.deadline)")

    def _reply(self, message_id: str, waiting: dict[str, Parcel]) -> Iterator[Reply]:
        """Yield the replies to the tasks of one message, if they have come: then it is no longer waited for."""
        try:
            message = pull(self._grid, message_id)
        except UnreadableError as error:
            yield from waiting.pop(message_id).failed(str(error))
            return
        if message is not None:
            yield from self._read(message, waiting.pop(message_id))

    def _read(self, message: Message, parcel: Parcel) -> list[Reply]:
        """Return the replies in a message. Whatever a client sent costs no more than the replies to its own tasks."""
        try:
            if message.has_error():
                return list(parcel.failed(describe(message)))
            up = travelled(message.content, len(parcel.tasks))
            replies = [
                self._held_to_its_word(reply, task)
                for reply, task in zip(
                    read_replies(message.content, parcel.tasks, self._fp16), parcel.tasks, strict=True
                )
            ]
        except Exception as error:
            return list(parcel.failed(unreadable(error)))
        return [
            replace(reply, position=position, down=sent, up=received)
            for reply, position, sent, received in zip(replies, parcel.positions, parcel.down, up, strict=True)
        ]

    def _held_to_its_word(self, reply: Reply, task: Task) -> Reply:
        """Return the reply, or a failure where it does not claim the samples that its client had before it saw a task.

        They are the client's weight in the mean, or in pooled metrics.
        """
        node = self._roster.introduced().get(task.client) if isinstance(reply, Update) else None
        if node is None or not isinstance(reply, Update):
            return reply
        said, what = (node.tests, "test samples") if work_of(task.kind).tests else (node.samples, "samples")
        if reply.samples == said:
            return reply
        return Failure(task.client, f"it claims {reprlib.repr(reply.samples)} {what}, but said that it has {said}")


def _by_client(tasks: Iterable[Task]) -> dict[int, list[tuple[int, Task]]]:
    grouped: dict[int, list[tuple[int, Task]]] = {}
    for position, task in enumerate(tasks):
        grouped.setdefault(task.client, []).append((position, task))
    return grouped
