"""The model of a run, made the same in every process that needs it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fedhm.adapters.adapted import base_digest
from fedhm.assembly import Design, design, dtype_of, make_client, read_federation
from fedhm.config.loading import parse
from fedhm.config.schema import PrivacyConfig, ResolvedConfig
from fedhm.data.convert import DataLike, PublicLike, to_public_samples, to_samples
from fedhm.data.federation import Federation, public_feed, split_client_test
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.data.text import TextLimits, text_limits
from fedhm.errors import FedhmError
from fedhm.flower.apps import ClientApp, Context, client_number, make_client_app
from fedhm.flower.wire import Terms
from fedhm.machine.device import find_device
from fedhm.models.build import build_model
from fedhm.networks.reuse import NetworkPool
from fedhm.seeds import derive
from fedhm.work.client import Client


@dataclass(frozen=True)
class OwnModel:
    """A user's own model. Two that are equal make the same model."""

    make: Callable[[], nn.Module]
    seed: int

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "model"))
            return self.make()


@dataclass(frozen=True)
class NamedModel:
    """The model that a config names."""

    config: ResolvedConfig
    input_shape: tuple[int, ...]
    outputs: int

    def build(self) -> nn.Module:
        return build_model(self.config, self.input_shape, self.outputs)


Model = OwnModel | NamedModel


@lru_cache(maxsize=4)
def demands(model: Model) -> tuple[torch.dtype, TextLimits]:
    """Return the type of a model's weights, and what it can read, without building the model with every message."""
    built = model.build()
    return dtype_of(built), text_limits(built)


# The client side of an app: from a node's model and data to a client that does tasks.

Format = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def client_app(
    model: Callable[[], nn.Module],
    data: Callable[[Context], DataLike],
    *,
    test: Callable[[Context], DataLike] | None = None,
    public: Callable[[], PublicLike] | None = None,
    privacy: Mapping[str, Any] | None = None,
) -> ClientApp:
    """Return a Flower ClientApp that trains whichever network its server sends.

    model   makes the full model, from which the method derives its networks
    data    this node's samples: a pair (inputs, labels) of arrays, or a dataset of such pairs; `context.node_config`
            has what the SuperNode was started with. It is asked with every message: cache what takes long
    test    this node's own test samples, on which it evaluates every tier's model; without, it holds some of its data
            out if the server asks for that
    public  inputs that everybody has, for methods that distil
    privacy the bound and noise for all that this node sends, {"clip": 1.0, "noise": 4.0}, whatever its server says;
            without, they are the server's (`privacy.where = "client"`), which then has to be trusted with them

    A node config says which client this is (`partition-id=0`), and may say which tier it can afford (`tier="1/4"`) or
    how many MiB it can spare for training (`memory=512`), or the file that `fedhm profile` wrote on it
    (`device-file="device.json"`), and where it computes (`device="cuda"`).
    """

    pinned = None if privacy is None else _own_privacy(privacy)

    def samples_of(context: Context, terms: Terms) -> Samples:
        dtype, limits = demands(OwnModel(model, terms.config.seed))
        whose = f"client {client_number(context)}"
        return limits.fitted(to_samples(data(context), whose, dtype, terms.config.objective), whose)

    def make_one(context: Context, terms: Terms) -> Client:
        config = terms.config if pinned is None else terms.config.model_copy(update={"privacy": pinned})
        own = OwnModel(model, config.seed)
        dtype, limits = demands(own)
        everybodys = public_feed(to_public_samples(public(), dtype), terms.preprocessing) if public else None
        number, samples, tests = client_number(context), samples_of(context, terms), None
        if test:
            tests = to_samples(test(context), f"the test set of client {number}", dtype, config.objective)
            tests = limits.fitted(tests, f"the test set of client {number}")
            config.objective.check(tests.labels, terms.classes, f"the test set of client {number}")
        elif terms.client_test:
            samples, tests = split_client_test(samples, terms.client_test, config.seed, number)
        config.objective.check(samples.labels, terms.classes, f"client {number}")
        networks = _networks(own, terms, _device(context, config), _format(samples, terms.preprocessing))
        return make_client(samples, terms.preprocessing, networks, config.for_client(number), everybodys, tests)

    return make_client_app(make_one, samples_of)


def named_client_app() -> ClientApp:
    """Return the app of runs from a config, which names model and data: each node takes its part of the data."""

    def samples_of(context: Context, terms: Terms) -> Samples:
        number, clients = client_number(context), _federation(terms.config).clients
        if number >= len(clients):
            raise FedhmError(f"this node has partition-id={number}, but the run has {len(clients)} clients")
        return clients[number]

    def make_one(context: Context, terms: Terms) -> Client:
        config, number = terms.config, client_number(context)
        federation, own_part = _federation(config), samples_of(context, terms)
        named = NamedModel(config, federation.input_shape, federation.classes)
        input_format = _format(federation.example, federation.preprocessing)
        networks = _networks(named, terms, _device(context, config), input_format)
        fit = text_limits(_designed(named, terms, input_format).model).fitted
        samples, public = fit(own_part, f"client {number}"), federation.public_feed()
        own, tests = config.for_client(number), federation.client_tests.of(number)
        tests = tests and fit(tests, f"the test set of client {number}")
        return make_client(samples, federation.preprocessing, networks, own, public, tests)

    return make_client_app(make_one, samples_of)


def _own_privacy(given: Mapping[str, Any]) -> PrivacyConfig:
    """Return the noise that a node adds whatever its server says, from settings as in a config."""
    found = parse({"privacy": {**given, "where": "client"}}, "client_app").privacy
    if not found.active or not found.noise:
        raise FedhmError("client_app: privacy needs a clip and a noise larger than 0")
    return found


def _device(context: Context, config: ResolvedConfig) -> str:
    return str(context.node_config.get("device", config.engine.device))


def _format(samples: Samples, preprocessing: Preprocessing) -> Format:
    """Return the names, shapes and types of a batch of one input; one without a name is a tensor alone."""
    batch, _ = Feed(samples, preprocessing).one()
    named = batch if isinstance(batch, dict) else {"": batch}
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in named.items())


# A SuperNode starts a process for every message; but those of a simulation do many messages, of many clients.


@lru_cache(maxsize=1)
def _federation(config: ResolvedConfig) -> Federation:
    return read_federation(config)


@lru_cache(maxsize=1)
def _designed(model: Model, terms: Terms, inputs: Format) -> Design:
    named = {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in inputs}
    return design(terms.config, model.build(), named.get("", named), terms.classes)


@lru_cache(maxsize=1)
def _networks(model: Model, terms: Terms, device: str, inputs: Format) -> NetworkPool:
    """Return the networks of the method, which needs no public samples here: those are the server's and the tasks'."""
    built = _designed(model, terms, inputs)
    if terms.base and base_digest(built.method.network(built.method.tiers[0])) != terms.base:
        raise FedhmError("this node's base is not the server's: adapters need the same pretrained model everywhere")
    return NetworkPool(built.method.network, find_device(device), terms.config.engine.compile)
