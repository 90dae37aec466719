"""Flower's grid without processes: messages go to real ClientApps in this one."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity


class GarbledError(Exception):
    """Raised by an app in place of a reply that Flower cannot read."""


@dataclass
class LoopbackNode:
    app: ClientApp
    config: dict[str, bool | int | float | str]
    key: bytes = b""  # its public key, as Flower's node authentication has it
    silent: bool = False  # it answers nothing any more, but Flower has not noticed yet


@dataclass
class Loopback(Grid):
    nodes: dict[int, LoopbackNode] = field(default_factory=dict)  # by node id
    replies: dict[str, Message | Exception] = field(default_factory=dict)
    pushed: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1  # the sender of messages

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node_id, public_key=node.key) for node_id, node in self.nodes.items()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(str(uuid4()))
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.pushed.append(message)
            node = self.nodes[message.metadata.dst_node_id]
            if not node.silent:
                self.replies[ids[-1]] = self._answer(node, message)
        return ids

    def _answer(self, node: LoopbackNode, message: Message) -> Message | Exception:
        context = Context(1, message.metadata.dst_node_id, node.config, RecordDict(), {})
        try:
            return node.app(message, context)
        except GarbledError as error:
            return error
        except Exception as error:  # as Flower words it
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for each in message_ids:
            reply = self.replies.pop(each, None)
            if isinstance(reply, Exception):
                raise reply
            if reply is not None:
                found.append(reply)
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def create_message(self, *_: object, **__: object) -> Message:
        raise NotImplementedError

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError
