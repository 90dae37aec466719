"""The ServerApp: waits for clients, gives each a tier, and runs the rounds on them. Late clients join a later round.

`server_app` is for a user's own model, `config_server_app` for runs whose config names model and data.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import InMemoryGrid
from rich.console import Console
from torch import nn

from fedhm.adapters.adapted import base_digest
from fedhm.assembly import assemble, design, read_federation
from fedhm.config.loading import parse_flat, parse_resolved
from fedhm.config.schema import NO_TIER, Config, ResolvedConfig
from fedhm.data.convert import DataLike, PublicLike, to_samples
from fedhm.data.federation import ClientTests, Federation, check_test_share, default_test_share, remote_federation
from fedhm.data.input_spec import InputSpec, majority_spec, placeholder_sample
from fedhm.data.samples import Feed, Preprocessing
from fedhm.errors import FedhmError, show_warnings
from fedhm.flower.clients import ConfigModel, Model, UserModel, dtype_and_limits
from fedhm.flower.engine import FlowerEngine
from fedhm.flower.nodes import (
    LateClients,
    Node,
    NodeRegistry,
    TierChooser,
    assign_tiers,
    settings_decide,
    tier_objection,
)
from fedhm.flower.submit import StatusFile
from fedhm.flower.wire import RunInfo, introduction_request
from fedhm.machine.memory import ROUND_ADVICE, memory_errors
from fedhm.machine.printable import printable
from fedhm.measure.cost import sample_spec
from fedhm.methods.method import AnyMethod
from fedhm.networks.exchange import structure_digest
from fedhm.networks.inputs import Inputs, sample_shape
from fedhm.report.progress import progress
from fedhm.run import report_on, resumed_settings
from fedhm.runs.folder import RunFolder
from fedhm.runs.identities import Identities
from fedhm.server.callbacks import Watcher
from fedhm.server.facts import TaskFacts
from fedhm.server.filters.fleet import ClientPlan, TierWork, plan_fleet, with_fleet_plan
from fedhm.server.sampling import check_assignment

# Makes the federation from the number of samples of each client, and the form of the inputs that most clients have
MakeFederation = Callable[[tuple[int, ...], str], Federation]


def server_app(
    model: Callable[[], nn.Module],
    test: Callable[[], DataLike] | None = None,
    classes: int = 0,
    *,
    inputs: Any = None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    crop: int = 0,
    flip: bool = False,
    public: Callable[[], PublicLike] | None = None,
    client_test: float | None = None,
) -> ServerApp:
    """Return a Flower ServerApp that trains `model` on the nodes that are connected.

    test         returns samples to evaluate every tier's model on, as `fedhm.run` takes them. Without it, models are
                 evaluated at the clients
    classes      the number of classes, or of numbers to predict, which the server does not see. 0: as many as the model
                 has outputs
    inputs       without `test`, the shape of one input, (3, 32, 32), or an array like one if inputs are neither floats
                 nor images. Without both, the server asks the clients and takes the form that most of them have
    mean, std    of each channel of uint8 images, which are divided by 255 and normalised
    crop, flip   clients augment images: a random window after padding by `crop` pixels, a random mirror image
    public       returns inputs that everybody has, for methods that distil
    client_test  the share of its samples that each client holds out to evaluate every tier's model on; 0.2 without
                 `test`. Clients with test samples of their own evaluate on these

    The app's run config holds the settings, by dotted keys: `train.rounds = 20`. With `out`, the path of a folder, the
    run writes there what `fedhm run` writes, and resumes an unfinished run in it. A client's number belongs to its
    SuperNode's key; `node-keys = false` is for SuperNodes that are started without one.
    """
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        config = parse_flat(context.run_config, "the run config")
        user_model = UserModel(model, config.seed)
        preprocessing, objective = Preprocessing(tuple(mean), tuple(std), crop, flip), config.objective

        def make_federation(sizes: tuple[int, ...], majority_inputs: str) -> Federation:
            shared = public() if public else None
            dtype, _ = dtype_and_limits(user_model)
            samples, outputs, form = (test() if test else None), classes, None
            if samples is None or not outputs:
                like = InputSpec.read(majority_inputs).zeros() if samples is None and inputs is None else inputs
                like = like if samples is None else to_samples(samples, "the test set", dtype, objective).example
                form, outputs = placeholder_sample(like, classes, user_model.build(), preprocessing, objective, dtype)
            federation = remote_federation(
                samples,
                outputs,
                sizes,
                preprocessing,
                public=shared,
                dtype=dtype,
                objective=objective,
                placeholder=form,
            )
            share = default_test_share(test is not None) if client_test is None else check_test_share(client_test)
            return replace(federation, client_tests=ClientTests(share=share))

        out = str(context.run_config.get("out", ""))
        with progress(Console(), objective.headline) as bar:
            run_on_grid(
                grid,
                config,
                user_model,
                make_federation,
                Path(out) if out else None,
                [bar],
                node_keys=_has_node_keys(context),
                ask_inputs=test is None and inputs is None,
            )

    return app


def config_server_app() -> ServerApp:
    """Return the ServerApp of runs whose config names model and data, as `fedhm run` submits them."""
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        settings = context.run_config
        status = StatusFile(Path(str(settings["status"])))
        # The umask of `fedhm run`: only Flower's own files are restricted to their owner.
        os.umask(int(str(settings["umask"]), 8))
        try:
            config = parse_resolved(str(settings["config"]), "the run's config")
            with warnings.catch_warnings():
                show_warnings(status.message)
                out = Path(str(settings["out"]))
                run_config_on_grid(grid, config, out, [status], status.message, _has_node_keys(context))
        except FedhmError as error:
            status.ended(str(error))
            raise
        except httpx.HTTPError as error:
            status.ended(f"the SuperLink does not answer any more ({type(error).__name__})", unforeseen=True)
            raise
        except BaseException as error:
            status.ended(f"the server raised {printable(repr(error))}; its log has more", unforeseen=True)
            raise
        status.ended()

    return app


def _has_node_keys(context: Context) -> bool:
    return context.run_config.get("node-keys", True) is not False


def run_config_on_grid(
    grid: Grid,
    config: ResolvedConfig,
    out: Path,
    watchers: Sequence[Watcher],
    say: Callable[[str], None] = print,
    node_keys: bool = True,
) -> None:
    federation = read_federation(config)
    model = ConfigModel(config, federation.input_shape, federation.classes)
    run_on_grid(grid, config, model, lambda *_: federation, out, watchers, say, node_keys)


@memory_errors("for the server", ROUND_ADVICE)
def run_on_grid(
    grid: Grid,
    config: Config,
    model: Model,
    make_federation: MakeFederation,
    out: Path | None,
    watchers: Sequence[Watcher],
    say: Callable[[str], None] = print,
    node_keys: bool = True,
    ask_inputs: bool = False,
) -> None:
    """Wait for the clients and run the remaining rounds on them.

    node_keys   a client's number belongs to its node's key
    ask_inputs  first ask the clients for the form of their inputs, which nobody else knows
    """
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"name": "flower"})})
    config = config.with_defence(deployed=not isinstance(grid, InMemoryGrid))  # Flower simulates in memory
    settings = resumed_settings(config, out).resolved()
    clients = settings.federation.clients
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder.open(out)) if out and (out / "config.toml").exists() else None
        resumed = folder is not None
        identities = Identities.read(folder.path) if folder else Identities()

        def registry_for(info: RunInfo) -> NodeRegistry:
            return NodeRegistry(grid, clients, introduction_request(info), say, identities if node_keys else None)

        inputs = settings.federation.inputs
        if ask_inputs and not inputs:
            inputs = _majority_inputs(registry_for(RunInfo(settings, 0, Preprocessing())), settings, resumed, say)
            if not resumed:
                federation_config = settings.federation.model_copy(update={"inputs": inputs})
                settings = settings.model_copy(update={"federation": federation_config})
        empty_federation = make_federation((0,) * clients, inputs)
        batch, _ = Feed(empty_federation.example, empty_federation.preprocessing).one()
        # Errors in the method or model are raised here, before anyone waits for clients.
        method = design(settings, model.build(), batch, empty_federation.classes, empty_federation.public_feed()).method
        check_assignment(settings.federation, clients, method.tiers, method.levels)

        registry = registry_for(_run_info(settings, empty_federation, method))
        chooser = _tier_chooser(settings, model.build(), method, batch)
        late = LateClients(settings, method, chooser, registry)
        if resumed:
            registry.check_tiers(late.objection)
        elif settings_decide(settings) and not settings.federation.devices:
            registry.check_tiers(partial(tier_objection, settings, method))
        _wait_for_clients(registry, settings, resumed)
        registry.report_missing()
        if not resumed:
            settings, refused = _with_tiers(
                settings, model.build(), method, batch, make_federation, registry.connected(), chooser
            )
            registry.exclude(refused)
            late = LateClients(settings, method, chooser, registry)
            registry.check_tiers(late.objection)
            if out:
                folder = stack.enter_context(RunFolder.create(out, settings))
                identities.keep_in(out)

        nodes = registry.connected()
        federation = make_federation(_sample_counts(nodes, clients), inputs)
        if federation.remote:
            tests = tuple(nodes[client].tests if client in nodes else 0 for client in range(clients))
            federation = replace(federation, client_tests=replace(federation.client_tests, remote=tests))
        info = _run_info(settings, federation, method)
        engine = FlowerEngine(grid, registry, info, settings.engine.deadline, settings.engine.fp16, late)
        try:
            experiment = assemble(model.build(), federation, settings, engine, watchers)
            experiment.filters = replace(experiment.filters, late=late)
            experiment.evaluation = replace(experiment.evaluation, reachable=late.reachable)
            experiment.run(folder)
        except FedhmError:
            if folder:
                folder.remove_if_no_round_done()
            raise
    if out:
        report_on(out)


def _wait_for_clients(registry: NodeRegistry, config: ResolvedConfig, resumed: bool) -> None:
    """Wait for all clients, and raise if a new run has too few. Missing clients may join later."""
    registry.wait_for(0 if resumed else config.federation.needed_clients, config.engine.patience)


def _majority_inputs(registry: NodeRegistry, config: ResolvedConfig, resumed: bool, say: Callable[[str], None]) -> str:
    """Wait for clients, return the form of the inputs that most of them have, and name the clients with another form.

    These take part all the same. A network may accept their inputs, and if it does not, only their updates are lost.
    """
    if config.privacy.active:
        raise FedhmError(
            "[privacy]: clients would describe their inputs without noise; give the server their shape by inputs="
        )
    _wait_for_clients(registry, config, resumed)
    forms = {client: InputSpec.read(node.inputs) for client, node in registry.connected().items() if node.inputs}
    majority, others = majority_spec(forms)
    for client in others:
        say(f"client {client} says that its inputs are {forms[client]}; those of most are {majority}")
    return str(majority)


def _tier_chooser(config: ResolvedConfig, model: nn.Module, method: AnyMethod, batch: Inputs) -> TierChooser:
    work = TierWork(method, model, config, *sample_spec(batch))
    return TierChooser(config, work, structure_digest(model, sample_shape(batch)))


def _with_tiers(
    config: ResolvedConfig,
    model: nn.Module,
    method: AnyMethod,
    batch: Inputs,
    make_federation: MakeFederation,
    nodes: Mapping[int, Node],
    chooser: TierChooser,
) -> tuple[ResolvedConfig, dict[int, str]]:
    """Return the settings with the clients' tiers, and the clients that get none, with the reason.

    The server's settings decide, or the plan for the devices that they list. Otherwise each node's introduction does.
    """
    by_node = assign_tiers(config, chooser, nodes)
    config = config.model_copy(update={"federation": by_node.federation})
    planned: list[ClientPlan] = []

    def plan() -> list[ClientPlan]:
        federation = make_federation(_sample_counts(nodes, config.federation.clients), config.federation.inputs)
        sample = next(Feed(federation.example, federation.preprocessing).ordered(1))
        facts = TaskFacts(method.network, federation, config, sample)
        planned.extend(plan_fleet(config, model, method, batch, facts))
        return planned

    config = with_fleet_plan(config, plan)
    unfit = {each.client: each.problem for each in planned if each.tier == NO_TIER}
    return config, {**by_node.refused, **unfit}


def _sample_counts(nodes: Mapping[int, Node], clients: int) -> tuple[int, ...]:
    return tuple(nodes[client].samples if client in nodes else 0 for client in range(clients))


def _run_info(config: ResolvedConfig, federation: Federation, method: AnyMethod) -> RunInfo:
    digest = base_digest(method.network(method.spec(method.tiers[0]))) if config.method.adapters else ""
    return RunInfo(config, federation.classes, federation.preprocessing, federation.client_tests.share, digest)
