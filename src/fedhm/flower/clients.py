"""The client side of an app: from a node's model and data to a client that does tasks."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import nn

from fedhm.config.reading import parse_text
from fedhm.config.settings import Config
from fedhm.data.batches import Feed
from fedhm.data.federation import DataLike, Federation, PublicLike, own_public, own_samples, public_feed
from fedhm.errors import FedhmError
from fedhm.flower.apps import ClientApp, Context, client_number, make_client_app
from fedhm.flower.models import Model, NamedModel, OwnModel, dtype_of, method_of
from fedhm.flower.wire import Terms
from fedhm.machine.device import find_device
from fedhm.run import read_federation
from fedhm.work.client import Client
from fedhm.work.reuse import Networks


def client_app(
    model: Callable[[], nn.Module],
    data: Callable[[Context], DataLike],
    *,
    public: Callable[[], PublicLike] | None = None,
) -> ClientApp:
    """A Flower ClientApp that trains whichever network its server sends.

    model   makes the full model, from which the method derives its networks
    data    this node's samples: a pair (inputs, labels) of arrays, or a dataset of such pairs; `context.node_config`
            has what the SuperNode was started with. It is asked with every message: cache what takes long
    public  inputs that everybody has, for methods that distil

    A node config says which client this is (`partition-id=0`), and may say which tier it can afford (`tier="1/4"`) or
    how many MiB it can spare for training (`memory=512`), and where it computes (`device="cuda"`).
    """

    def make_client(context: Context, config: Config, terms: Terms) -> Client:
        own = OwnModel(model, config.seed)
        everybodys = public_feed(own_public(public(), dtype_of(own)), terms.preprocessing) if public else None
        samples = own_samples(data(context), f"client {client_number(context)}", dtype_of(own))
        batch, _ = next(Feed(samples, terms.preprocessing).ordered(1))
        networks = _networks(own, terms, _device(context, config), tuple(batch.shape), batch.dtype)
        return Client(samples, terms.preprocessing, networks, config.train, config.seed, everybodys)

    return make_client_app(make_client)


def named_client_app() -> ClientApp:
    """For runs from a config, which names model and data: every node reads the data and takes its own part."""

    def make_client(context: Context, config: Config, terms: Terms) -> Client:
        federation, number = _federation(terms.config), client_number(context)
        if number >= len(federation.clients):
            raise FedhmError(f"this node has partition-id={number}, but the run has {len(federation.clients)} clients")
        batch, _ = next(Feed(federation.test, federation.preprocessing).ordered(1))
        named = NamedModel(terms.config, federation.input_shape, federation.classes)
        networks = _networks(named, terms, _device(context, config), tuple(batch.shape), batch.dtype)
        parts = (federation.preprocessing, networks, config.train, config.seed, federation.public_feed())
        return Client(federation.clients[number], *parts)

    return make_client_app(make_client)


def _device(context: Context, config: Config) -> str:
    return str(context.node_config.get("device", config.engine.device))


# A SuperNode starts a process for every message; but those of a simulation do many messages, of many clients.


@lru_cache(maxsize=1)
def _federation(config: str) -> Federation:
    return read_federation(parse_text(config, "the config"))


@lru_cache(maxsize=1)
def _networks(model: Model, terms: Terms, device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Networks:
    config = parse_text(terms.config, "the config")
    method = method_of(model, config, torch.zeros(shape, dtype=dtype), terms.classes)
    return Networks(method.network, find_device(device), config.engine.compile)
