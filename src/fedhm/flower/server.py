"""Ask the clients what their inputs are like, for a server that has no samples and was not told."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from torch import nn

from fedhm.adapters.adapted import base_digest
from fedhm.assembly import assemble, design, read_federation
from fedhm.config.loading import parse_flat, parse_resolved
from fedhm.config.schema import (
    NO_TIER,
    Config,
    DeviceConfig,
    FederationConfig,
    ResolvedConfig,
    fixed_level,
    parse_profile,
)
from fedhm.data.convert import DataLike, PublicLike, to_samples
from fedhm.data.federation import ClientTests, Federation, check_test_share, default_test_share, remote_federation
from fedhm.data.input_spec import InputSpec, majority_spec, placeholder_sample
from fedhm.data.samples import Feed, Preprocessing
from fedhm.errors import FedhmError, show_warnings
from fedhm.flower.apps import Context, Grid, ServerApp, make_server_app
from fedhm.flower.clients import Model, NamedModel, OwnModel, demands
from fedhm.flower.engine import FlowerEngine
from fedhm.flower.follow import StatusFile
from fedhm.flower.nodes import Node, Roster
from fedhm.flower.wire import Terms, greeting
from fedhm.machine.printable import printable
from fedhm.measure.cost import sample_spec
from fedhm.methods.method import AnyMethod
from fedhm.methods.tier_work import TierWork, plan_fleet
from fedhm.networks.exchange import structure_digest
from fedhm.networks.inputs import Inputs, sample_shape
from fedhm.report.progress import progress
from fedhm.run import report_on, resumed_settings
from fedhm.runs.folder import RunFolder
from fedhm.runs.identities import Identities
from fedhm.server.callbacks import Watcher
from fedhm.server.collect import Intake
from fedhm.server.filters.fleet import Planned, foreign, largest_in, modes, with_plan
from fedhm.server.sampling import check_assignment


def unknown_inputs(config: ResolvedConfig) -> Terms:
    """Return the terms of a server that cannot say yet how many classes there are: nodes then tell of their inputs."""
    return Terms(config, 0, Preprocessing())


def inputs_of_most(roster: Roster, config: ResolvedConfig, all_of_them: bool, say: Callable[[str], None]) -> str:
    """Wait for clients, return what most of them say of their inputs, and say who says otherwise.

    These are not left out: a network may take their inputs as well, and if not, that costs their own updates.
    """
    if config.privacy.active:
        raise FedhmError(
            "[privacy]: clients would say without noise what their inputs are like: tell the server by inputs="
        )
    roster.gather(config.engine.patience, all_of_them)
    said = {client: InputSpec.read(node.inputs) for client, node in roster.introduced().items() if node.inputs}
    found, others = majority_spec(said)
    for client in others:
        say(f"client {client} says that its inputs are {said[client]}; those of most are {found}")
    return str(found)


# Which tier each client gets: the one that its node config names, or the largest that fits its memory.


@dataclass(frozen=True)
class Tiers:
    federation: FederationConfig  # with the tiers that clients have
    refused: dict[int, str]  # clients that can have none, and why


def with_devices(config: Config, nodes: Mapping[int, Node], digest: str) -> Tiers:
    """Make the nodes' device files the devices of the run, if there are such; who has a foreign one is left out."""
    federation = config.federation
    if federation.devices or not any(node.device for node in nodes.values()):
        return Tiers(federation, {})
    refused: dict[int, str] = {}
    described: dict[str, tuple[dict[str, Any], list[int]]] = {}  # by what nodes say of themselves
    for client in range(federation.clients):
        node = nodes.get(client, Node(client, 0))
        if node.tier or federation.assignment or federation.heterogeneity == "dynamic":
            raise FedhmError("a client names its device file, but others have tiers that are given or drawn: do either")
        known: dict[str, Any] = {"memory": node.memory} if node.memory else {}
        try:
            profile = parse_profile(node.device, "what it sent") if node.device else None
            reason = foreign(profile, digest, config.train) if profile else ""
        except FedhmError as error:
            profile, reason = None, str(error)
        if reason:
            refused[client] = f"its device file is of no use here: {printable(reason)}"
        elif profile:
            known["profile"] = profile
        described.setdefault(f"{reason and client} {node.memory} {node.device}", (known, []))[1].append(client)
    devices = [
        DeviceConfig(name=f"{_called(known)} {number}", clients=tuple(clients), **known)
        for number, (known, clients) in enumerate(described.values(), start=1)
    ]
    unfit = "leave-out" if federation.unfit == "refuse" else federation.unfit  # others need not stop for one of them
    return Tiers(federation.model_copy(update={"devices": tuple(devices), "unfit": unfit}), refused)


def _called(known: Mapping[str, Any]) -> str:
    return printable(known["profile"].name)[:40] if "profile" in known else "device"


def chosen_tiers(config: Config, work: TierWork, nodes: Mapping[int, Node]) -> Tiers:
    """Choose tiers: a client that asks for none gets that of its number; one that cannot get its own is left out."""
    asking = {client: node for client, node in nodes.items() if node.tier or node.memory}
    federation = config.federation
    if not asking or federation.given_tiers or federation.devices or federation.heterogeneity == "dynamic":
        return Tiers(federation, {})
    assignment: list[str] = []
    checkpointed: list[int] = []
    refused: dict[int, str] = {}
    for client in range(federation.clients):
        node = asking.get(client)
        if node is None:
            assignment.append(work.levels[fixed_level(client, len(work.levels))])
        elif node.tier and node.tier in (*work.tiers, *work.levels):
            assignment.append(node.tier)
        elif not node.tier and (found := largest_in(node.memory, work, bool(config.train.checkpointing))):
            assignment.append(found[0])
            checkpointed += [client] if found[1] and not config.train.checkpointing else []
        else:
            assignment.append(work.tiers[-1])
            refused[client] = _why(node, work, config)
    found_for_all = {"assignment": tuple(assignment), "checkpointed": tuple(checkpointed)}
    return Tiers(federation.model_copy(update=found_for_all), refused)


def too_much(config: Config, method: AnyMethod, node: Node) -> str:
    """Return why a client may not have the tier that it names: it was given a smaller one. Empty if it may.

    Given by the server's settings, by what it said when the run began, or by its number. What it can spare names no
    tier: it was measured when the run began.
    """
    if not node.tier or config.federation.heterogeneity == "dynamic":
        return ""
    order = tuple(dict.fromkeys([*method.levels, *method.tiers]))  # largest first
    if node.tier not in order:
        return _unknown(node, method.tiers)
    by_number = method.levels[fixed_level(node.client, len(method.levels))]
    given = config.federation.given_tiers[node.client] if config.federation.given_tiers else by_number
    if order.index(node.tier) >= order.index(given):
        return ""
    return f"it asks for tier {node.tier}, but was given {given}, which is smaller"


def _unknown(node: Node, tiers: Sequence[str]) -> str:
    return f"it asks for tier '{printable(node.tier)}', known are {', '.join(tiers)}"


def _why(node: Node, work: TierWork, config: Config) -> str:
    if node.tier:
        return _unknown(node, work.tiers)
    ways = [(tier, again) for tier in work.tiers for again in modes(work, bool(config.train.checkpointing))]
    size, tier = min((work.memory(tier, again), tier) for tier, again in ways)
    return (
        f"it can spare {node.memory >> 20} MiB, but training even tier {tier} takes {-(-size >> 20)} MiB "
        f"with train.batch = {config.train.batch}"
    )


# The server side of an app: finds out which clients there are, and runs the loop on them.

# Makes the federation from the number of samples at each client, and what most of them say of their inputs
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

    test        samples to evaluate every tier's model on, as `fedhm.run` takes them; without, models are evaluated at
                the clients
    classes     how many there are, or numbers to predict, which the server does not see; 0: as many as the model has
                outputs
    inputs      without `test`, what goes into the model: the shape of one input, (3, 32, 32); an array like one where
                that is neither of floats nor an image. If that is not said either, it is what most clients say
    mean, std   of each channel, where inputs are uint8 images: these are divided by 255 and normalised
    crop, flip  clients augment images: random window after padding by `crop` pixels, random mirror image
    public      inputs that everybody has, for methods that distil
    client_test the share of its samples that each client holds out of its training, to evaluate every tier's model
                there, too, 0.2 where there is no `test`; clients that bring test samples of their own evaluate on
                these

    Settings are the app's run config, by dotted keys: `train.rounds = 20`. With `out`, the path of a folder, the run
    leaves there what `fedhm run` leaves, and resumes an unfinished run that it finds there. A client's number belongs
    to its SuperNode's key; `node-keys = false` is for SuperNodes that are started without one.
    """

    def serve(grid: Grid, context: Context) -> None:
        config = parse_flat(context.run_config, "the run config")
        own = OwnModel(model, config.seed)
        preprocessing, learned = Preprocessing(tuple(mean), tuple(std), crop, flip), config.objective

        def federation(sizes: tuple[int, ...], said_inputs: str) -> Federation:
            everybodys = public() if public else None
            dtype, _ = demands(own)
            samples, outputs, form = (test() if test else None), classes, None
            if samples is None or not outputs:
                like = InputSpec.read(said_inputs).zeros() if samples is None and inputs is None else inputs
                like = like if samples is None else to_samples(samples, "the test set", dtype, learned).example
                form, outputs = placeholder_sample(like, classes, own.build(), preprocessing, learned, dtype)
            there = remote_federation(samples, outputs, sizes, preprocessing, everybodys, dtype, learned, form)
            share = default_test_share(test is not None) if client_test is None else check_test_share(client_test)
            return replace(there, client_tests=ClientTests(share=share))

        said = context.run_config
        out, keys = str(said.get("out", "")), said.get("node-keys", True) is not False
        with progress(Console(), config.objective.headline) as bar:
            folder, ask = Path(out) if out else None, test is None and inputs is None
            run_on(grid, config, own, federation, folder, [bar], node_keys=keys, ask_inputs=ask)

    return make_server_app(serve)


def named_server_app() -> ServerApp:
    """Return the app of runs from a config, which names model and data."""

    def serve(grid: Grid, context: Context) -> None:
        said = context.run_config
        status = StatusFile(Path(str(said["status"])))
        # Flower's files are their owner's only, but the run's are as a user wishes
        os.umask(int(str(said["umask"]), 8))
        try:
            config = parse_resolved(str(said["config"]), "the run's config")
            out, keys = Path(str(said["out"])), said.get("node-keys", True) is not False
            with warnings.catch_warnings():
                show_warnings(status.said)
                run_named(grid, config, out, [status], status.said, keys)
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

    return make_server_app(serve)


def run_named(
    grid: Grid,
    config: ResolvedConfig,
    out: Path,
    watchers: Sequence[Watcher],
    say: Callable[[str], None] = print,
    node_keys: bool = True,
) -> None:
    federation = read_federation(config)
    named = NamedModel(config, federation.input_shape, federation.classes)
    run_on(grid, config, named, lambda *_: federation, out, watchers, say, node_keys)


def run_on(
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
    """Wait for the clients, ask what their inputs are like if nobody else knows, then run the rounds that are left."""
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"name": "flower"})})
    settings = resumed_settings(config, out).resolved()
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder.open(out)) if out and (out / "config.toml").exists() else None
        clients = settings.federation.clients
        identities = Identities.read(folder.path) if folder else Identities()

        def roster_of(terms: Terms) -> Roster:
            return Roster(grid, clients, greeting(terms), say, identities if node_keys else None)

        inputs = settings.federation.inputs
        if ask_inputs and not inputs:
            inputs = inputs_of_most(roster_of(unknown_inputs(settings)), settings, folder is None, say)
            if not folder:
                found = settings.federation.model_copy(update={"inputs": inputs})
                settings = settings.model_copy(update={"federation": found})
        bare = make_federation((0,) * clients, inputs)
        batch, _ = Feed(bare.example, bare.preprocessing).one()
        # what is wrong with the method or model is said before anyone waits, if nobody has to be asked
        method = design(settings, model.build(), batch, bare.classes, bare.public_feed()).method
        check_assignment(settings.federation, clients, method.tiers, method.levels)
        roster = roster_of(_terms(settings, bare, method))
        if folder or settings.federation.given_tiers:
            roster.hold_to(partial(too_much, settings, method))
        roster.gather(settings.engine.patience, all_of_them=folder is None)
        if not folder:
            settings, refused = _with_tiers(
                settings, model.build(), method, batch, make_federation, roster.introduced()
            )
            roster.leave_out(refused)
            roster.hold_to(partial(too_much, settings, method))
            if out:
                folder = stack.enter_context(RunFolder.create(out, settings))
                identities.keep_in(out)
        known = roster.introduced()
        federation = make_federation(_sizes(known, clients), inputs)
        if federation.remote:
            tests = tuple(known[c].tests if c in known else 0 for c in range(clients))
            federation = replace(federation, client_tests=replace(federation.client_tests, remote=tests))
        place = settings.engine
        engine = FlowerEngine(grid, roster, _terms(settings, federation, method), place.deadline, place.fp16)
        try:
            assemble(model.build(), federation, settings, engine, watchers).run(folder)
        except FedhmError:
            if folder:
                folder.remove_if_no_round_done()
            raise
    if out:
        report_on(out)


def _with_tiers(
    config: ResolvedConfig,
    model: nn.Module,
    method: AnyMethod,
    batch: Inputs,
    make_federation: MakeFederation,
    nodes: Mapping[int, Node],
) -> tuple[ResolvedConfig, dict[int, str]]:
    """Return the settings with the tiers that clients get by what their nodes say or by their devices, and who none."""
    by_file = with_devices(config, nodes, structure_digest(model, sample_shape(batch)))
    config = config.model_copy(update={"federation": by_file.federation})
    work = TierWork(method, model, config, *sample_spec(batch))
    tiers = chosen_tiers(config, work, nodes)
    config = config.model_copy(update={"federation": tiers.federation})
    planned: list[Planned] = []

    def plan() -> list[Planned]:
        federation = make_federation(_sizes(nodes, config.federation.clients), config.federation.inputs)
        sample = next(Feed(federation.example, federation.preprocessing).ordered(1))
        planned.extend(plan_fleet(config, model, method, batch, Intake(method.network, federation, config, sample, ())))
        return planned

    config = with_plan(config, plan)
    left_out = {each.client: each.problem for each in planned if each.tier == NO_TIER}
    return config, {**tiers.refused, **left_out, **by_file.refused}


def _sizes(nodes: Mapping[int, Node], clients: int) -> tuple[int, ...]:
    return tuple(nodes[client].samples if client in nodes else 0 for client in range(clients))


def _terms(config: ResolvedConfig, federation: Federation, method: AnyMethod) -> Terms:
    base = base_digest(method.network(method.tiers[0])) if config.method.adapters else ""
    return Terms(config, federation.classes, federation.preprocessing, federation.client_tests.share, base)
