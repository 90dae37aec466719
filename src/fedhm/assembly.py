"""From settings, a model and data to a ready experiment: the only place where parts are put together."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from warnings import warn

import torch
from torch import nn

from fedhm.config.schema import Config, DataConfig, EngineConfig, ResolvedConfig
from fedhm.data.federation import Federation, expected_federation, load_federation
from fedhm.data.images import downscale_shape
from fedhm.data.samples import Feed, Preprocessing, SampleCache, Samples
from fedhm.data.sources import SOURCES, is_found
from fedhm.data.text import text_limits
from fedhm.engines.engine import Engine, FlowerOnlyEngine, LocalEngine, find_devices, workers_for
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.experiment import Experiment
from fedhm.lowrank.hadamard import Hadamard
from fedhm.lowrank.hybrid import plan_of
from fedhm.lowrank.layers import dense_weight_name
from fedhm.machine.device import CPU
from fedhm.machine.files import check_file_names
from fedhm.machine.memory import DATA_ADVICE, MODEL_ADVICE, lacks_memory, memory_errors
from fedhm.measure.self_written import find_self_written
from fedhm.methods.means import mean_of
from fedhm.methods.method import AnyMethod, Setup
from fedhm.models.build import build_model
from fedhm.models.own import OwnModel, build_own
from fedhm.networks.exchange import exchanged_tensors
from fedhm.networks.inputs import Inputs, probe_model
from fedhm.networks.reuse import NetworkPool, check_compiler
from fedhm.ondevice.executorch import require_executorch
from fedhm.ondevice.settings import check_train_settings
from fedhm.seeds import Secret
from fedhm.server.callbacks import EarlyStopping, Watcher
from fedhm.server.evaluation import Evaluation
from fedhm.server.facts import TaskFacts
from fedhm.server.filters.defence import check_attackers
from fedhm.server.filters.fleet import plan_fleet, with_fleet_plan
from fedhm.server.round import round_filters
from fedhm.server.sampling import check_assignment, check_min_updates, check_partition
from fedhm.tracking.trackers import trackers
from fedhm.work.client import Client, LocalNoise
from fedhm.work.train import check_memory_savings, check_optimizer


@dataclass(frozen=True)
class Design:
    """A model with the method that trains it: all that can be told of a run without its data."""

    config: Config
    model: nn.Module
    method: AnyMethod
    sample: Inputs  # a batch of one input
    classifiers: tuple[str, ...] = ()  # the layers that give the outputs


def design(config: Config, model: nn.Module, sample: Inputs, outputs: int, public: Feed | None = None) -> Design:
    """Put a method around a model; `outputs` is how many classes there are, or numbers to predict."""
    classifiers = probe_model(model, sample, lambda output: config.objective.check_output(output, outputs))
    setup = Setup(
        classifiers[-1] if classifiers else None,
        sample,
        config.seed,
        public,
        fixed=config.federation.heterogeneity == "fixed",
        objective=config.objective,
        nested=config.train.nested_shares,
        nested_tier=config.train.nested_tier,
        make_mean=mean_of(config.server, config.method),
        train=config.train,
        optimizer_follows=config.server.optimizer != "none" or config.privacy.at_server,
        classifiers=classifiers,
    )
    method = config.method.build(model, setup)
    _check_training(model, method, sample, frozen=bool(config.method.adapters))
    return Design(config, model, method, sample, classifiers)


def _check_training(model: nn.Module, method: AnyMethod, sample: Inputs, frozen: bool) -> None:
    """Refuse a model whose pass in training gives no tensor, or changes weights that a tier has as factors only."""
    try:
        written = find_self_written(model, sample) & {name for name, _ in model.named_parameters()}
    except FedhmError:
        raise
    except Exception as error:  # whatever a foreign model raises: it may train on other batches, and clients say if not
        if lacks_memory(error):
            raise
        return
    if frozen and written:
        raise FedhmError(
            f"the model's forward changes '{min(written)}' itself, and cannot be a base that stays as it is"
        )
    for tier in method.tiers if written else ():
        network = method.network(method.spec(tier))
        layers = (*plan_of(network), *plan_of(network, Hadamard))
        factorized = {dense_weight_name(layer) for layer in layers}
        if lost := sorted(written & factorized):
            raise FedhmError(
                f"the model's forward changes '{lost[0]}' itself, which has no effect in tier {tier}, where it "
                "is made of factors: compute it by a parametrization of torch.nn.utils, whose layer stays dense"
            )


def named_design(config: Config, model: OwnModel | None = None) -> Design:
    """Put the method around the model that a config names, without reading data where the source is a known one.

    model  a user's own, in place of the config's
    """
    if model is not None:
        shape, outputs = input_format(config)
        return design(config, build_own(model, config.seed), torch.zeros(1, *shape), outputs)
    if config.model is not None and config.model.base:  # how long texts are is not known without them
        federation = read_federation(config)
        sample, _ = Feed(federation.example, federation.preprocessing).one()
        return design(config, build_model(config, (), federation.classes), sample, federation.classes)
    shape, outputs = input_format(config)
    return design(config, build_model(config, shape, outputs), torch.zeros(1, *shape), outputs)


@memory_errors("to prepare the networks of the tiers", MODEL_ADVICE)
def assemble(
    model: nn.Module,
    federation: Federation,
    config: Config,
    engine: Engine | None = None,
    watchers: Sequence[Watcher] = (),
) -> Experiment:
    """Put an experiment together; without an engine, it runs on this machine as its config says.

    Methods that train adapters read the model where it lies: it must stay as it is until the run has ended.
    """
    settings = config.resolved()
    devices = find_devices(settings.engine)
    if settings.engine.compile:
        check_compiler(devices[0])
    if settings.method.needs_public and not federation.public:
        raise FedhmError(
            f"{settings.method.name} distils on public data, of which this run has none: "
            "set data.public to a source or to 'held-out', or give fedhm.run some with public="
        )
    check_optimizer(model, settings.train)
    if settings.engine.client == "executorch":
        _check_runtime(settings, federation.size, devices)
    federation.check_targets(settings.objective)
    given, federation = federation, federation.map_samples(text_limits(model).fitted)
    cache, preprocessing = sample_cache(settings.engine, devices[0]), federation.preprocessing
    public = federation.public_feed()
    public = public and public.on(devices[0], cache)
    sample = Feed(federation.example, preprocessing).one()
    check_memory_savings(model, settings, sample[0])
    method = design(settings, model, sample[0], federation.classes, public).method
    for sentence in method.remarks():
        warn(sentence, FedhmWarning, stacklevel=2)
    check_assignment(settings.federation, federation.size, method.tiers, method.levels)
    check_file_names(method.tiers)
    check_min_updates(settings.federation, federation.size)
    check_attackers(settings.server, settings.federation.per_round(federation.size))
    check_partition(settings, method.levels)
    facts = TaskFacts(method.network, federation, settings, sample)
    settings = with_fleet_plan(settings, lambda: plan_fleet(settings, model, method, sample[0], facts))
    initial = exchanged_tensors(model)
    if not settings.method.adapters:  # a frozen base is not trained, and a copy of it may fill the memory
        initial = {name: tensor.clone() for name, tensor in initial.items()}
    test = None if federation.test is None else Feed(federation.test, preprocessing, devices[0], cache)
    holders = federation.client_tests.holders([federation.samples_of(client) for client in range(federation.size)])
    if test is None and not holders:
        raise FedhmError(
            "there is nothing to evaluate on: give the server test samples, or let clients hold out a share of theirs "
            "(data.client_test = 0.2 in a config, client_test=0.2 in Python)"
        )
    secret = Secret()
    networks = NetworkPool(method.network, devices[0], settings.engine.compile)
    engine = engine or _own_engine(settings, federation, networks, public, secret, cache)
    filters = round_filters(settings, model, method, federation, facts, secret, engine.run, clients_test=bool(holders))
    return Experiment(
        config=settings,
        method=method,
        initial=initial,
        federation=given,
        facts=facts,
        filters=filters,
        evaluation=Evaluation(
            settings,
            method,
            facts,
            filters.admission,
            federation.size,
            test,
            holders,
            # forked workers can use an accelerator only if this process never does
            test_client=federation.size if isinstance(engine, LocalEngine) and engine.evaluates else None,
        ),
        early_stopping=EarlyStopping(settings.stop, settings.objective.headline, method.tiers, at_clients=test is None),
        engine=engine,
        watchers=[*watchers, *trackers(settings.tracking)],
    )


def _check_runtime(config: ResolvedConfig, clients: int, devices: Sequence[torch.device]) -> None:
    """Refuse settings that clients on ExecuTorch's runtime cannot follow."""
    why = "engine.client = 'executorch'"
    if config.engine.name == "local":
        require_executorch(why)
    check_train_settings(config.train, why)
    if config.engine.name == "local" and devices[0] != CPU:
        raise FedhmError(f"{why} computes on the processor: set engine.device = 'cpu'")
    if config.engine.compile:
        raise FedhmError(f"{why} does not go with engine.compile, which is PyTorch's")
    if config.evaluation.diagnostics == "theory":
        raise FedhmError(f"{why} measures no steps: leave evaluation.diagnostics = 'theory' out")
    if config.method.adapters:
        raise FedhmError(f"{why} trains whole networks, and method.name = '{config.method.name}' trains adapters")
    if wrong := [number for number in config.engine.executorch_clients if number >= clients]:
        raise FedhmError(f"engine.executorch_clients names client {wrong[0]}, and there are {clients}, from 0")


def _own_engine(
    config: ResolvedConfig,
    federation: Federation,
    networks: NetworkPool,
    public: Feed | None,
    secret: Secret,
    cache: SampleCache | None,
) -> Engine:
    if federation.remote:
        raise FedhmError("the clients' samples lie elsewhere: an experiment must be given an engine to reach them")
    if config.engine.name != "local":
        return FlowerOnlyEngine()
    tests, preprocessing = federation.client_tests.of, federation.preprocessing
    clients = [
        make_client(samples, preprocessing, networks, config.for_client(number), public, tests(number), secret, cache)
        for number, samples in enumerate(federation.clients)
    ]
    if federation.test is not None:  # the server's test set, for an engine that evaluates
        held = federation.test
        tester = make_client(held, preprocessing, networks, config, None, held, secret, cache)
        clients.append(replace(tester, noise=None))  # nothing of it leaves the server
    per_round, server_trains = config.federation.per_round(federation.size), config.method.server_trains
    workers = workers_for(config.engine, per_round, server_trains=server_trains)
    return LocalEngine(clients, workers, config.engine.threads, find_devices(config.engine))


def sample_cache(engine: EngineConfig, device: torch.device) -> SampleCache | None:
    """Return where samples stay on an accelerator; None if they do not."""
    if device == CPU or engine.data_on_device is False:
        return None
    most = engine.data_on_device
    return SampleCache(device, None if most == "auto" else sys.maxsize if most is True else most)


def make_client(
    samples: Samples,
    preprocessing: Preprocessing,
    networks: NetworkPool,
    config: Config,
    public: Feed | None,
    tests: Samples | None = None,
    secret: Secret | None = None,
    cache: SampleCache | None = None,
) -> Client:
    """Put a client together, in whichever process it does its tasks; `secret` is where noise of its own comes from."""
    noise = LocalNoise(config.privacy, secret or Secret()) if config.privacy.at_clients else None
    return Client(
        samples, preprocessing, networks, config.train, config.seed, public, config.objective, tests, noise, cache,
        config.engine.client,
    )  # fmt: skip


@memory_errors("to read the data", DATA_ADVICE)
def read_federation(config: Config) -> Federation:
    """Read the data that a config names and deal it out to the clients."""
    if config.data is None and config.engine.name == "flower":
        raise FedhmError(
            "this run has no [data] section: it is one of a Flower app, and the same 'flwr run' resumes it"
        )
    if config.data is None:
        raise FedhmError(
            "this run has no [data] section: it was started from Python with its own data, "
            "and is resumed there, by fedhm.run with the same arguments, or with from_round=ROUND from an earlier round"
        )
    base = config.model.base if config.model else ""
    return load_federation(config.data, config.federation.clients, config.seed, base, config.objective.per_token)


def planned_federation(config: Config) -> Federation:
    """Return the federation that a plan is made for. If the data's files are missing, its published size counts."""
    data = config.data
    if data is None or not lacks_files(data):
        return read_federation(config)
    return expected_federation(data, config.federation.clients, config.seed)


def lacks_files(data: DataConfig) -> bool:
    """Tell whether the files of a data set of known size are missing."""
    known = SOURCES.get(data.source)
    return bool(known and known.train_samples) and not is_found(data.source, data.folder)


def input_format(config: Config) -> tuple[tuple[int, ...], int]:
    """Return input shape and number of outputs, without reading data where the source is a known one."""
    source = SOURCES.get(config.data.source) if config.data else None
    if config.data and source and source.shape:
        return downscale_shape(source.shape, config.data.downscale), source.outputs
    federation = read_federation(config)
    return federation.input_shape, federation.classes


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the type of a model's weights."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
