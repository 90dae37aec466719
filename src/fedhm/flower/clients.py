"""The ClientApp: the code that runs on a node. It makes a client of the node's model and data, and does tasks with it.

`client_app` is for a user's own model and data, `config_client_app` for runs whose config names both. A SuperNode
starts a process for every message, but a process of a simulation handles many messages of many clients. So everything
that takes long to make is cached here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import nn

from fedhm.adapters.adapted import base_digest
from fedhm.assembly import Design, design, dtype_of, make_client, read_federation
from fedhm.config.loading import parse
from fedhm.config.schema import PrivacyConfig, ResolvedConfig, read_profile
from fedhm.config.units import parse_size
from fedhm.data.convert import DataLike, PublicLike, to_public_samples, to_samples
from fedhm.data.federation import Federation, public_feed, split_client_test
from fedhm.data.input_spec import InputSpec
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.data.text import TextLimits, text_limits
from fedhm.engines.masks import masks_without_waiting
from fedhm.errors import FedhmError
from fedhm.flower.nodes import Node
from fedhm.flower.wire import RunInfo, decode_tasks, encode_replies
from fedhm.machine.device import find_device, set_threads
from fedhm.machine.memory import MODEL_ADVICE, NotEnoughMemoryError, memory_errors
from fedhm.machine.process import return_freed_memory
from fedhm.models.build import build_model
from fedhm.networks.inputs import Inputs
from fedhm.networks.reuse import NetworkPool
from fedhm.seeds import derive
from fedhm.work.client import Client
from fedhm.work.messages import Failure, Reply, Task


def client_app(
    model: Callable[[], nn.Module],
    data: Callable[[Context], DataLike],
    *,
    test: Callable[[Context], DataLike] | None = None,
    public: Callable[[], PublicLike] | None = None,
    privacy: Mapping[str, Any] | None = None,
) -> ClientApp:
    """Return a Flower ClientApp that trains whichever network its server sends.

    model    makes the full model, from which the method derives its networks
    data     returns this node's samples: a pair (inputs, labels) of arrays, or a dataset of such pairs.
             `context.node_config` has the node config of the SuperNode. Called with every message: cache slow reads
    test     returns this node's own test samples, on which it evaluates every tier's model. Without it, the node holds
             out some of its data if the server asks for that
    public   returns inputs that everybody has, for methods that distil
    privacy  the bound and noise for everything that this node sends, {"clip": 1.0, "noise": 4.0}, whatever its server
             says. Without it they are the server's (`privacy.where = "client"`), and the node has to trust the server

    The node config must say which client this is (`partition-id=0`). It may name the tier that the node can afford
    (`tier="1/4"`), the MiB that it can spare for training (`memory=512`), or the file that `fedhm profile` wrote on it
    (`device-file="device.json"`). It may also say where the node computes (`device="cuda"`).
    """

    pinned = None if privacy is None else _pinned_privacy(privacy)

    def read_samples(context: Context, info: RunInfo) -> Samples:
        dtype, limits = dtype_and_limits(UserModel(model, info.config.seed))
        owner = f"client {client_number(context)}"
        return limits.fitted(to_samples(data(context), owner, dtype, info.config.objective), owner)

    def make(context: Context, info: RunInfo) -> Client:
        config = info.config if pinned is None else info.config.model_copy(update={"privacy": pinned})
        user_model = UserModel(model, config.seed)
        dtype, limits = dtype_and_limits(user_model)
        shared = public_feed(to_public_samples(public(), dtype), info.preprocessing) if public else None
        number, samples, tests = client_number(context), read_samples(context, info), None
        if test:
            tests = to_samples(test(context), f"the test set of client {number}", dtype, config.objective)
            tests = limits.fitted(tests, f"the test set of client {number}")
            config.objective.check(tests.labels, info.classes, f"the test set of client {number}")
        elif info.client_test:
            samples, tests = split_client_test(samples, info.client_test, config.seed, number)
        config.objective.check(samples.labels, info.classes, f"client {number}")
        networks = _networks(user_model, info, _device(context, config), _batch_spec(samples, info.preprocessing))
        return make_client(samples, info.preprocessing, networks, config.for_client(number), shared, tests)

    return _make_app(make, read_samples)


def config_client_app() -> ClientApp:
    """Return the ClientApp of runs whose config names model and data: each node takes its part of the data."""

    def read_samples(context: Context, info: RunInfo) -> Samples:
        number, clients = client_number(context), _federation(info.config).clients
        if number >= len(clients):
            raise FedhmError(f"this node has partition-id={number}, but the run has {len(clients)} clients")
        return clients[number]

    def make(context: Context, info: RunInfo) -> Client:
        config, number = info.config, client_number(context)
        federation, own_part = _federation(config), read_samples(context, info)
        model = ConfigModel(config, federation.input_shape, federation.classes)
        spec = _batch_spec(federation.example, federation.preprocessing)
        networks = _networks(model, info, _device(context, config), spec)
        fit = text_limits(_design(model, info, spec).model).fitted
        samples, tests = fit(own_part, f"client {number}"), federation.client_tests.of(number)
        tests = tests and fit(tests, f"the test set of client {number}")
        shared = federation.public_feed()
        return make_client(samples, federation.preprocessing, networks, config.for_client(number), shared, tests)

    return _make_app(make, read_samples)


def _make_app(
    make: Callable[[Context, RunInfo], Client], read_samples: Callable[[Context, RunInfo], Samples]
) -> ClientApp:
    """Return an app that introduces its node, and does tasks with the client that `make` returns.

    A server without samples first asks for the form of those that `read_samples` returns. Without it there are no
    networks, and so no client.
    """
    app = ClientApp()

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        info = RunInfo.decode(message.content)
        number, tier = client_number(context), str(context.node_config.get("tier", ""))
        try:
            if info.classes:
                memory, device = _spare_memory(context), _device_file(context)
                with memory_errors("to prepare the client's model and data", MODEL_ADVICE):
                    client = make(context, info)
                node = Node(number, len(client.samples), tier, memory, tests=len(client.tests or ()), device=device)
            else:
                samples = read_samples(context, info)
                node = Node(number, len(samples), inputs=str(InputSpec.of(samples)))
        except Exception as error:  # a user's model and data can raise anything; the server should know whose it is
            node = Node(number, 0, problem=f"{type(error).__name__}: {error}".splitlines()[0])
        return Message(node.encode(), reply_to=message)

    @app.train()
    def work(message: Message, context: Context) -> Message:
        info = RunInfo.decode(message.content)
        engine, number = info.config.engine, client_number(context)
        set_threads(engine.threads)
        if any(context.node_config.get(name) for name in ("memory", "device-file")):
            return_freed_memory()  # the plan counts live tensors, not memory that was freed
        replies = _replies(lambda: make(context, info), number, list(decode_tasks(message.content)))
        return Message(encode_replies(replies, engine.fp16), reply_to=message)

    return app


def _replies(make: Callable[[], Client], number: int, tasks: Sequence[Task]) -> list[Reply]:
    """Do tasks with the client that `make` returns. Too little memory on this node costs its own updates only."""
    try:
        with memory_errors("to prepare the client's model and data", MODEL_ADVICE):
            client = make()
    except NotEnoughMemoryError as error:
        return [Failure(task.client, str(error)) for task in tasks]
    return [_reply(client, number, task) for task in tasks]


def _reply(client: Client, number: int, task: Task) -> Reply:
    if task.client != number:
        return Failure(task.client, f"its task came to client {number}")
    try:
        with masks_without_waiting(client.networks.device):  # as the local engine does
            return client.reply(task)
    except NotEnoughMemoryError as error:
        return Failure(task.client, str(error))


# ---- the node config, and a node's own settings ----


def client_number(context: Context) -> int:
    """Return which client a node is, from its node config; in a simulation Flower writes it."""
    number = context.node_config.get("partition-id")
    if type(number) is not int:
        raise FedhmError("the node config must say which client this is: partition-id=0, 1, …")
    return number


def _spare_memory(context: Context) -> int:
    """Return the bytes that a node can spare, from its node config: a whole number of MiB, or "512MB"."""
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


def _device(context: Context, config: ResolvedConfig) -> str:
    return str(context.node_config.get("device", config.engine.device))


def _pinned_privacy(given: Mapping[str, Any]) -> PrivacyConfig:
    """Return the noise that a node adds whatever its server says, from settings as in a config."""
    found = parse({"privacy": {**given, "where": "client"}}, "client_app").privacy
    if not found.active or not found.noise:
        raise FedhmError("client_app: privacy needs a clip and a noise larger than 0")
    return found


# ---- the model of a run, built equal in every process ----


@dataclass(frozen=True)
class UserModel:
    """A user's own model. Equal values build equal models."""

    make: Callable[[], nn.Module]
    seed: int

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "model"))
            return self.make()


@dataclass(frozen=True)
class ConfigModel:
    """The model that a config names."""

    config: ResolvedConfig
    input_shape: tuple[int, ...]
    outputs: int

    def build(self) -> nn.Module:
        return build_model(self.config, self.input_shape, self.outputs)


Model = UserModel | ConfigModel
BatchSpec = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]  # name, shape and type of each tensor


@lru_cache(maxsize=4)
def dtype_and_limits(model: Model) -> tuple[torch.dtype, TextLimits]:
    """Return the type of a model's weights and the texts that it can read. Cached: building a model takes time."""
    built = model.build()
    return dtype_of(built), text_limits(built)


def _batch_spec(samples: Samples, preprocessing: Preprocessing) -> BatchSpec:
    """Return the names, shapes and types in a batch of one input; tensors without names are called by numbers."""
    batch, _ = Feed(samples, preprocessing).one()
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in _named(batch).items())


def _named(batch: Inputs) -> dict[str, torch.Tensor]:
    if isinstance(batch, dict):
        return batch
    return {str(number): tensor for number, tensor in enumerate(batch)} if isinstance(batch, tuple) else {"": batch}


def _zeros(spec: BatchSpec) -> Inputs:
    """Return a batch of one input of zeros."""
    named = {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in spec}
    if "" in named:
        return named[""]
    return tuple(named.values()) if all(name.isdecimal() for name in named) else named


@lru_cache(maxsize=1)
def _federation(config: ResolvedConfig) -> Federation:
    return read_federation(config)


@lru_cache(maxsize=1)
def _design(model: Model, info: RunInfo, spec: BatchSpec) -> Design:
    return design(info.config, model.build(), _zeros(spec), info.classes)


@lru_cache(maxsize=1)
def _networks(model: Model, info: RunInfo, device: str, spec: BatchSpec) -> NetworkPool:
    """Return the networks of the method. It needs no public samples here: the server and the tasks have them."""
    method = _design(model, info, spec).method
    if info.base_digest and base_digest(method.network(method.spec(method.tiers[0]))) != info.base_digest:
        raise FedhmError("this node's base is not the server's: adapters need the same pretrained model everywhere")
    return NetworkPool(method.network, find_device(device), info.config.engine.compile)
