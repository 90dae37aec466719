"""Flower's apps: what a node does with a message, and what runs beside the SuperLink."""

from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedhm.config.schema import read_profile
from fedhm.config.units import parse_size
from fedhm.data.input_spec import InputSpec
from fedhm.data.samples import Samples
from fedhm.errors import FedhmError
from fedhm.flower.nodes import Node
from fedhm.flower.wire import Terms, read_tasks, reply_parcel
from fedhm.machine.process import return_freed_memory
from fedhm.work.client import Client
from fedhm.work.messages import Failure, Reply, Task

__all__ = ["ClientApp", "Context", "Grid", "ServerApp", "client_number", "make_client_app", "make_server_app"]

MakeClient = Callable[[Context, Terms], Client]
ReadSamples = Callable[[Context, Terms], Samples]


def make_client_app(make_client: MakeClient, samples_of: ReadSamples) -> ClientApp:
    """Return an app that introduces its node, and does tasks by the client that `make_client` makes of it.

    A server without samples asks first what those of `samples_of` are like: until it knows, there are no networks.
    """
    app = ClientApp()

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        terms = Terms.read(message.content)
        number, tier = client_number(context), str(context.node_config.get("tier", ""))
        try:
            if not terms.classes:
                samples = samples_of(context, terms)
                return _answered(message, Node(number, len(samples), inputs=str(InputSpec.of(samples))))
            memory, device = _spare_memory(context), _device_file(context)
            client = make_client(context, terms)
            node = Node(number, len(client.samples), tier, memory, tests=len(client.tests or ()), device=device)
        except Exception as error:  # of a user's model and data: the server shall know whose they are
            node = Node(number, 0, problem=f"{type(error).__name__}: {error}".splitlines()[0])
        return _answered(message, node)

    @app.train()
    def work(message: Message, context: Context) -> Message:
        terms = Terms.read(message.content)
        engine, number = terms.config.engine, client_number(context)
        torch.set_num_threads(engine.threads)
        if any(context.node_config.get(name) for name in ("memory", "device-file")):
            return_freed_memory()  # its plan counts what is alive, not what was freed
        client = make_client(context, terms)
        replies = [_answer(client, number, task) for task in read_tasks(message.content)]
        return Message(reply_parcel(replies, engine.fp16), reply_to=message)

    return app


def make_server_app(serve: Callable[[Grid, Context], None]) -> ServerApp:
    app = ServerApp()
    app.main()(serve)
    return app


def _answered(message: Message, node: Node) -> Message:
    return Message(node.introduction(), reply_to=message)


def client_number(context: Context) -> int:
    """Return which client a node is, by its node config; in a simulation Flower writes that."""
    number = context.node_config.get("partition-id")
    if type(number) is not int:
        raise FedhmError("the node config must say which client this is: partition-id=0, 1, …")
    return number


def _spare_memory(context: Context) -> int:
    """Return the bytes that a node can spare, by its node config: a whole number of MiB, or "512MB"."""
    given = context.node_config.get("memory", 0)
    try:
        if isinstance(given, str):
            return parse_size(given)
    except ValueError as error:
        raise FedhmError(f"the node config's memory: {error}") from None
    if type(given) is not int or given < 0:
        raise FedhmError(f"the node config's memory must be a whole number of MiB, or a size, not {given!r}")
    return given << 20


def _device_file(context: Context) -> str:
    """Return the content of the device file that a node config names; empty if it names none."""
    given = str(context.node_config.get("device-file", ""))
    return read_profile(Path(given)).model_dump_json(exclude_none=True) if given else ""


def _answer(client: Client, number: int, task: Task) -> Reply:
    return client.reply(task) if task.client == number else Failure(task.client, f"its task came to client {number}")
